"""Runs that the clock ends: they decay in time, and are the runs of as many steps as it came to."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from lm.errors import ConfigError
from lm.storage.checkpoint import CheckpointReader, checkpoints
from lm.training.module import TrainModule
from lm.training.run import train_rank
from lm.training.state import Clock
from tests.training.conftest import Configure, Stop, read, results

MANY = ["optim=adamw", "trainer.max_steps=200", "trainer.val_every=1000", "checkpoint.every=1000"]


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes one, and from the 7th on two: whoever has looked before finds less time left than there was."""

    def lap(clock: Clock, step: int, spent: dict[str, float]) -> float:
        clock.step_s, clock.steps, clock.spent = 1.0 if step < 7 else 2.0, step - clock._step, spent
        passed, clock._step = clock.step_s * (step - clock._step), step
        return passed

    monkeypatch.setattr(Clock, "lap", lap)


def decided(run: Path) -> list[int]:
    return [line["max_steps"] for line in read(run / "metrics.jsonl") if line.get("event") == "length decided"]


@pytest.mark.usefixtures("seconds")
@pytest.mark.parametrize("schedule", [["schedule=wsd"], pytest.param(["schedule=constant"], marks=pytest.mark.slow)])
def test_a_run_that_the_clock_ends_is_the_run_of_as_many_steps(configure: Configure, tmp_path: Path, schedule: list[str]) -> None:
    """Of 24 seconds. Seen to fail with a length of which the steps behind would have had other rates."""
    given = [*MANY, *schedule, "trainer.log_every=3"]
    summary = train_rank(configure(*given, "trainer.max_minutes=0.4"))
    assert decided(tmp_path / "run") == [summary["steps"]] and summary["steps"] == pytest.approx(16, abs=2) and not summary["stopped_early"]
    train_rank(configure(*given, f"trainer.max_steps={summary['steps']}", "run.name=again"))
    (bytes_of, lines), (again, others) = (results(tmp_path / name) for name in ("run", "again"))
    assert bytes_of == again and [line for line in lines if "event" not in line] == others
    assert train_rank(configure(*given, "trainer.max_minutes=0.4"))["steps"] == summary["steps"]  # nothing is left to do


@pytest.mark.slow
@pytest.mark.usefixtures("seconds")
def test_what_the_clock_has_decided_is_resumed(configure: Configure, tmp_path: Path) -> None:
    """From a checkpoint in the decay, by the same command."""
    given = [*MANY, "schedule=wsd", "trainer.max_minutes=0.2", "checkpoint.every=8"]
    train_rank(configure(*given, "run.name=whole"))
    steps = decided(tmp_path / "whole")[0]
    train_rank(configure(*given))
    newest, before = checkpoints(tmp_path / "run" / "checkpoints")
    assert CheckpointReader(before).meta["counters"]["max_steps"] == steps and newest.name.endswith(f"{steps:08}")
    for file in (newest / "manifest.json", tmp_path / "run" / "summary.json", tmp_path / "run" / "model" / "manifest.json"):
        file.unlink()
    summary = train_rank(configure(*given))
    assert summary["steps"] == steps and results(tmp_path / "run") == results(tmp_path / "whole")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_early"] is False


@pytest.mark.parametrize(
    ("given", "remedy"),
    [(["schedule=cosine"], "Use schedule=wsd or constant"), (["schedule=wsd", "schedule.decay_frac=1.0"], r"Lower schedule\.decay_frac")],
)
def test_a_rate_that_depends_on_the_length_from_the_start_is_refused(configure: Configure, given: list[str], remedy: str) -> None:
    """Seen to say schedule=wsd to a run that has it."""
    with pytest.raises(ConfigError, match=rf"trainer\.max_minutes=5 leaves the length to the clock.*{remedy}"):
        configure(*MANY, *given, "trainer.max_minutes=5")


@pytest.mark.slow
@pytest.mark.usefixtures("seconds")
@pytest.mark.parametrize(("every", "times"), [(11, 1), (11, 2), (1, 1)], ids=["to before", "twice to before", "to since"])
def test_what_the_clock_has_decided_stands_where_the_run_goes_back(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, times: int
) -> None:
    """To a checkpoint from before, or since, and is told once. Seen to fail with the counters of that checkpoint, and told twice, and where
    the run goes back to it again."""
    leapt: list[float] = []
    looks: list[float] = []

    def is_spike(loss: float, recent: list[float], factor: float | None) -> bool:
        looks.extend([loss] if decided(tmp_path / "run") else [])
        if len(leapt) == times or len(looks) < (2 if every == 1 else 1):
            return False
        leapt.append(loss)
        return True

    monkeypatch.setattr("lm.training.callbacks.bad_steps.is_spike", is_spike)
    given = [*MANY, "schedule=wsd", "trainer.max_minutes=1", f"checkpoint.every={every}", "trainer.log_every=1"]
    given += [f"numerics.rollbacks={times}"]
    summary, events = train_rank(configure(*given)), read(tmp_path / "run" / "metrics.jsonl")
    back = [line for line in events if line.get("event") == "rolled back"]
    assert len(back) == times and decided(tmp_path / "run") == [summary["steps"]]
    assert train_rank(configure(*given))["steps"] == summary["steps"]  # nothing is left to do


def test_the_first_step_of_a_process_is_not_taken_for_the_pace(configure: Configure, stop: Stop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles, say. Seen to fail where a run is resumed: of two minutes it used 40 seconds, and ended after 11 steps instead of 91."""
    at, own = [0.0], TrainModule.training_step

    def stepped(module: TrainModule, *args: Any) -> Tensor:
        first = module.reader is not None and module.step == module.reader.meta["step"]
        at[0] += 30.0 if first else 1.0
        return own(module, *args)

    monkeypatch.setattr("lm.training.state.time", SimpleNamespace(perf_counter=lambda: at[0]))
    monkeypatch.setattr(TrainModule, "training_step", stepped)
    cfg = configure(*MANY, "schedule=wsd", "trainer.log_every=3", "trainer.max_minutes=2")
    stop(cfg, 4)
    summary = train_rank(cfg)
    assert (summary["steps"], summary["train_s"]) == (91, 120.0)


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_few_steps_that_fill_the_time_are_not_too_many(
    configure: Configure, stop: Stop, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Of a second each, where a line comes every 40. Seen to fail: 20 seconds became 77."""
    at, own = [0.0], TrainModule.training_step

    def stepped(module: TrainModule, *args: Any) -> Tensor:
        at[0] += 1.0
        return own(module, *args)

    monkeypatch.setattr("lm.training.state.time", SimpleNamespace(perf_counter=lambda: at[0]))
    monkeypatch.setattr(TrainModule, "training_step", stepped)
    cfg = configure(*MANY, "schedule=wsd", "trainer.log_every=40", f"trainer.max_minutes={20 / 60}")
    if again:
        stop(cfg, 4)
    assert train_rank(cfg)["steps"] == 20
