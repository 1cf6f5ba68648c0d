"""Where a run goes back to after a leap of its loss, wherever it was stopped before."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lm.storage.checkpoint import CheckpointReader, checkpoints
from lm.training.callbacks.bad_steps import Rollback
from lm.training.callbacks.validation import Validation
from lm.training.module import TrainModule
from lm.training.run import train_rank
from tests.training.conftest import Configure, Stop, read, results


@pytest.fixture(autouse=True)
def leaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of step 11 is ten times what it was, until the run goes back."""
    own = TrainModule.loss

    def loss(module: TrainModule) -> torch.Tensor:
        return own(module) * (10 if module.step == 11 and not module.run.counters.rolled_back else 1)

    monkeypatch.setattr(TrainModule, "loss", loss)


@pytest.mark.slow
def test_a_run_stopped_before_a_leap_goes_back_as_far_as_one_that_was_not(configure: Configure, stop: Stop, tmp_path: Path) -> None:
    """Stopped twice between the checkpoint of step 8 and the leap at step 11, each with a save that a run left alone does not make. Seen to
    fail: it went back to the stop, and with one checkpoint kept that of step 8 was gone."""
    given = ["optim=adamw", "numerics.rollbacks=1", "checkpoint.every=4", "checkpoint.keep_last=1", "trainer.log_every=1"]
    train_rank(configure(*given, "run.name=whole"))
    stop(configure(*given), 9)
    stop(configure(*given), 10)
    train_rank(configure(*given))
    for run in ("whole", "run"):
        events = [(line["step"], line["event"]) for line in read(tmp_path / run / "metrics.jsonl") if "event" in line]
        assert events == [(8, "rolled back")]
    assert results(tmp_path / "run") == results(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_stopped_after_it_went_back_goes_on_from_there(
    configure: Configure, stop: Stop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from what it had saved before it went back, which is gone. The best model of then is there, though a better one came and went.
    Seen to fail: the run could never end, as the checkpoint of step 5 was missing."""
    own = Validation._losses

    def losses(self: Validation, module: TrainModule, *args: Any) -> Any:
        step = module.step if module.run.counters.rolled_back == 0 else 0
        return own(self, module, *args) | {"val_loss": {5: 2.0, 9: 1.0}.get(step, 3.0)}

    monkeypatch.setattr(Validation, "_losses", losses)
    given = ["optim=adamw", "numerics.rollbacks=1", "checkpoint.every=8", "checkpoint.keep_last=1", "trainer.log_every=1"]
    given += ["checkpoint.best=true", "trainer.val_every=1"]
    whole = train_rank(configure(*given, "run.name=whole"))
    assert (whole["steps"], whole["model_step"]) == (12, 5)
    stop(configure(*given), 10)
    stop(configure(*given), 9)  # after it went back from 11 to 8
    assert [path.name[-2:] for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["09", "08", "05"]
    train_rank(configure(*given))
    assert results(tmp_path / "run") == results(tmp_path / "whole")


class Killed(BaseException):
    """Nobody catches it."""


def test_a_run_killed_after_it_went_back_and_before_a_save_tells_of_that_once(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes back again. Seen to fail: metrics.jsonl had the event of step 8 twice, and a rollback more than the run."""
    own = TrainModule.training_step

    def killed(module: TrainModule, *args: Any) -> torch.Tensor:
        if (module.step, module.run.counters.rolled_back) == (9, 1):
            raise Killed
        return own(module, *args)

    given = ["optim=adamw", "numerics.rollbacks=1", "checkpoint.every=4", "trainer.log_every=1"]
    train_rank(configure(*given, "run.name=whole"))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(TrainModule, "training_step", killed)
        train_rank(configure(*given))
    train_rank(configure(*given))
    assert results(tmp_path / "run") == results(tmp_path / "whole")


def test_a_run_goes_back_to_the_newest_checkpoint_where_that_on_schedule_is_gone(configure: Configure, stop: Stop, tmp_path: Path) -> None:
    """As where rollbacks were not asked for yet when it was stopped."""
    given = ["optim=adamw", "checkpoint.every=4", "checkpoint.keep_last=1", "trainer.log_every=1"]
    stop(configure(*given), 9)
    train_rank(configure(*given, "numerics.rollbacks=1"))
    events = [(line["step"], line["event"]) for line in read(tmp_path / "run" / "metrics.jsonl") if "event" in line]
    assert events == [(9, "rolled back")]


@pytest.mark.parametrize("stopped", [6, 8])
def test_a_rollback_of_a_run_with_a_fresh_optimizer_restores_the_optimizer_too(
    configure: Configure, stop: Stop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int
) -> None:
    """To the state of the checkpoint where this process has saved it, and anew where it is the one that was resumed. Seen to fail: the
    state was that of the leap, steps after the weights."""
    found = list[float]()

    def counted(module: TrainModule) -> float:
        return next(float(piece.tensor) for piece in module._state() if piece.kind == "step")

    own = Rollback._go_back

    def go_back(self: Rollback, module: TrainModule, reader: CheckpointReader) -> None:
        own(self, module, reader)
        found.append(counted(module))

    monkeypatch.setattr(Rollback, "_go_back", go_back)
    given = ["optim=adamw", "numerics.rollbacks=1", "checkpoint.every=4", "trainer.log_every=1"]
    stop(configure(*given), stopped)
    train_rank(configure(*given, "resume.fresh_optimizer=true"))
    assert found == [8 - stopped]
