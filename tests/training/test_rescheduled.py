"""Resumed runs with another schedule: it may change where no step so far would have had another rate."""

from pathlib import Path

import pytest

from lm.errors import ConfigError
from lm.training.run import train_rank
from tests.training.conftest import Configure, Stop, results

CONSTANT = ("schedule=constant", "schedule.warmup_steps=2")
DECAYS = ("schedule=wsd", "schedule.warmup_steps=2", "schedule.decay_frac=0.5")


@pytest.mark.parametrize(
    ("before", "after"),
    [(CONSTANT, DECAYS), (DECAYS, (*DECAYS[:2], "schedule.decay_frac=0.25")), ((*DECAYS, "trainer.max_steps=20"), DECAYS)],
    ids=["a decay", "a shorter one", "an earlier one"],
)
def test_the_same_bits_as_with_that_schedule_from_the_start(
    configure: Configure, stop: Stop, tmp_path: Path, capsys: pytest.CaptureFixture[str], before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    train_rank(configure(*after, "run.name=whole"))
    stop(configure(*before), 5)
    capsys.readouterr()
    train_rank(configure(*after))
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    told = "the schedule is another one than the run's, and the same for the 5 steps so far" in " ".join(capsys.readouterr().out.split())
    assert told == (before[:3] != after[:3])


def test_a_run_that_has_ended_goes_on_with_a_decay(configure: Configure, tmp_path: Path) -> None:
    train_rank(configure(*DECAYS, "trainer.max_steps=16", "run.name=whole"))
    train_rank(configure(*CONSTANT, "trainer.max_steps=8"))
    train_rank(configure(*DECAYS, "trainer.max_steps=16"))
    assert results(tmp_path / "run")[0] == results(tmp_path / "whole")[0]


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        (CONSTANT, (*DECAYS[:2], "schedule.decay_frac=1"), r"schedule\.\S+"),
        (CONSTANT, ("schedule=constant", "schedule.warmup_steps=3"), r"schedule\.warmup_steps"),
        (DECAYS, (*DECAYS, "optim.lr=0.5"), r"optim\.lr"),
        (CONSTANT, (*DECAYS, "trainer.max_steps=7"), r"trainer\.max_steps"),
    ],
    ids=["begun already", "another warm-up", "another rate", "too short"],
)
def test_a_schedule_that_would_have_been_another_so_far_is_refused(
    configure: Configure, stop: Stop, before: tuple[str, ...], after: tuple[str, ...], differs: str
) -> None:
    stop(configure(*before), 5)
    with pytest.raises(ConfigError, match=rf"exists with another config \({differs}.* and a schedule that it has not come to"):
        train_rank(configure(*after))
