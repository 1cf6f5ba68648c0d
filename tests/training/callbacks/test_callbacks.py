"""Callbacks and metrics of one's own, and Lightning's, beside those of the house."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    StochasticWeightAveraging,
    Timer,
)

from lm.errors import ConfigError, LmError
from lm.schema import Tree, from_tree
from lm.storage.checkpoint import checkpoints
from lm.storage.manifest import verify
from lm.training.config import CallbackConfig, MetricConfig, TrainConfig
from lm.training.launch.start import train
from lm.training.run import train_rank
from tests.server import Process
from tests.training.conftest import Before, Configure, ranks, read, results


class WeightNormConfig(MetricConfig):
    """The norm of all weights."""

    kind: Literal["test_weight_norm"] = "test_weight_norm"
    scale: float = 1.0

    def build(self) -> Callable[[Any, Any], Tree]:
        def norm(trainer: Any, module: Any) -> Tree:
            total = torch.stack([p.detach().square().sum() for p in module.model.parameters()]).sum()
            return {"weight_norm": float(total.sqrt()) * self.scale}

        return norm


class LossTwiceConfig(MetricConfig):
    kind: Literal["test_loss"] = "test_loss"

    def build(self) -> Callable[[Any, Any], Tree]:
        return lambda trainer, module: {"loss": 0.0}


class StopAtConfig(CallbackConfig):
    kind: Literal["test_stop_at"] = "test_stop_at"
    step: int

    def build(self) -> Callback:
        return StopAt(self.step)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if pl_module.step == self.step:
            trainer.should_stop = True


def with_plugins(cfg: TrainConfig, **plugins: Tree) -> TrainConfig:
    return from_tree(TrainConfig, cfg.tree() | plugins)


@pytest.mark.slow
def test_lightnings_timer_ends_a_run_with_all_saved_and_it_goes_on_from_there(configure: Configure, tmp_path: Path) -> None:
    """As the run left alone but for a validation where it was ended. Seen to fail with nothing saved at the end."""
    train_rank(configure("run.name=whole"))
    timer = Timer(timedelta(days=1))
    ended = train_rank(configure(), callbacks=[Before(7, lambda module: setattr(timer, "_duration", 0.0)), timer])
    assert (ended["steps"], ended["stopped_early"]) == (7, True)
    assert checkpoints(tmp_path / "run" / "checkpoints")[0].name == "step-00000007"
    verify(tmp_path / "run" / "model")
    assert [line["step"] for line in read(tmp_path / "run" / "metrics.jsonl") if "val_loss" in line] == [4, 7]
    assert train_rank(configure())["steps"] == 12
    (weights, lines), (expected, whole) = results(tmp_path / "run"), results(tmp_path / "whole")
    assert weights == expected
    assert [line for line in lines if (line["step"], "val_loss" in line) != (7, True)] == whole


class Exiting(Callback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_end(self, *args: Any) -> None:
        raise self.error


def test_a_callback_that_ends_the_process_is_an_error(configure: Configure) -> None:
    """Seen: exit code 0 in the middle of a run; and of two ranks the other was told that 'its own error says why', and there was none; and
    as the same error an interrupt, of which Lightning makes an exit."""
    with pytest.raises(LmError, match=r"SystemExit: 0\."):
        train_rank(configure("trainer.max_steps=3"), callbacks=[Exiting(SystemExit(0))])
    with pytest.raises(KeyboardInterrupt):
        train_rank(configure("trainer.max_steps=3"), callbacks=[Exiting(KeyboardInterrupt())])


class Never(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = True


def test_a_callback_that_ends_a_run_before_its_first_step_is_told(configure: Configure) -> None:
    """Seen to fail: the error was that a file of a checkpoint is missing, which nobody had asked for. A run that goes on ends as it was."""
    cfg = configure("trainer.max_steps=4")
    with pytest.raises(LmError, match=r"callbacks: one set trainer\.should_stop before the first step, so that nothing is saved"):
        train_rank(cfg, callbacks=[Never()])
    train_rank(configure("trainer.max_steps=3"))
    assert train_rank(cfg, callbacks=[Never()])["steps"] == 3


STOPPING = """
from typing import Literal
from lightning import Callback
from lm.kinds import CallbackConfig

class StopsConfig(CallbackConfig):
    "One rank ends the run."
    kind: Literal["stops"] = "stops"
    def build(self):
        return Stops()

class Stops(Callback):
    def HOOK(self, trainer, module, *args):
        trainer.should_stop = module.global_rank == 1 and module.step == STEP
"""


@pytest.mark.slow
@pytest.mark.parametrize(("hook", "step"), [("on_train_batch_end", 5), ("on_train_start", 0), ("on_train_epoch_start", 0)])
def test_a_callback_that_ends_the_run_on_one_rank_ends_it_on_all(
    hook: str, step: int, lm_process: Callable[..., Process], tiny: list[str], tmp_path: Path
) -> None:
    """Seen to wait for each other until launch.timeout_s: the one rank validated, and the other trained."""
    (tmp_path / "stopping.py").write_text(STOPPING.replace("HOOK", hook).replace("STEP", str(step)))
    given = ["plugins=stopping.py", "+callbacks.stops={}", "optim=adamw", "launch.timeout_s=30"]
    done = lm_process("train", *tiny, *given, *ranks("ddp"))
    assert done.wait() == 0, done.stderr
    assert checkpoints(tmp_path / "run" / "checkpoints")[0].name == f"step-{step:08}"


@pytest.mark.slow
def test_lightnings_summary_and_hooks_of_ones_own_run_beside_ours(configure: Configure, tmp_path: Path) -> None:
    """Behind ours but that which saves: at the end of a step they find it counted, and what they keep is saved then."""
    seen: list[tuple[int, int]] = []

    def look(trainer: Any, module: Any, *args: Any) -> None:
        if module.stepped:
            seen.append((module.step, len(checkpoints(tmp_path / "run" / "checkpoints"))))

    train_rank(configure("trainer.micro_batch=4"), callbacks=[ModelSummary(), LambdaCallback(on_train_batch_end=look)])
    assert [step for step, _ in seen] == list(range(1, 13))
    assert dict(seen)[4] == 0 and dict(seen)[5] == 1
    train_rank(configure("trainer.micro_batch=4", "run.name=alone"))
    assert results(tmp_path / "run") == results(tmp_path / "alone")


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (ModelCheckpoint(), "checkpoint.every"),
        (EarlyStopping("val_loss"), "trainer.early_stop"),
        (GradientAccumulationScheduler({0: 2}), "trainer.micro_batch"),
        (StochasticWeightAveraging(1e-3), "trainer.ema_decay"),
        (LearningRateMonitor(), "metrics.jsonl"),
        (ModelPruning("l1_unstructured"), "callback of your own"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_callback_that_cannot_work_is_refused_with_what_does(configure: Configure, callback: Callback, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"^callbacks: {type(callback).__name__} .*{remedy}"):
        train_rank(configure(), callbacks=[callback])


@pytest.mark.parametrize(("given", "kind"), [(LambdaCallback, "type"), (5, "int")])
def test_what_is_no_callback_is_refused(configure: Configure, given: Any, kind: str, tmp_path: Path) -> None:
    """Seen to fail in a session: vars() argument must have __dict__ attribute."""
    for begun in (train_rank, train):
        with pytest.raises(ConfigError, match=rf"^callbacks: {kind} was given\. Each is an object of a Callback"):
            begun(configure(), callbacks=[given])
    assert not (tmp_path / "run").exists()


def test_an_error_that_is_its_own_cause_ends_a_training(configure: Configure) -> None:
    """Seen to hang."""

    def fail(*_: object) -> None:
        error = ConfigError("mine: it is broken. Mend it.")
        raise error from error

    with pytest.raises(ConfigError, match="mine: it is broken"):
        train(configure(), callbacks=[LambdaCallback(on_train_batch_end=fail)])


def test_metrics_and_callbacks_of_a_config_take_their_name_as_their_kind(configure: Configure, tmp_path: Path) -> None:
    cfg = with_plugins(
        configure(),
        metrics={"test_weight_norm": {"scale": 2.0}},
        callbacks={"test_stop_at": {"step": 5}},
    )
    assert cfg.tree()["callbacks"] == {"test_stop_at": {"kind": "test_stop_at", "step": 5}}
    assert from_tree(TrainConfig, cfg.tree()) == cfg
    assert train_rank(cfg)["steps"] == 5
    lines = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert len(lines) == 5 and all(line["weight_norm"] > 1 for line in lines)


def test_a_metric_may_not_take_the_name_of_ours(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"metrics.test_loss: 'loss' is in each line"):
        train_rank(with_plugins(configure(), metrics={"test_loss": {}}))


def test_metrics_may_change_when_a_run_resumes_and_callbacks_may_not(configure: Configure) -> None:
    train_rank(configure("trainer.max_steps=4"))
    with pytest.raises(ConfigError, match=r"callbacks.test_stop_at"):
        train_rank(with_plugins(configure(), callbacks={"test_stop_at": {"step": 5}}))
    assert train_rank(with_plugins(configure(), metrics={"test_weight_norm": {}}))["steps"] == 12


def test_an_unknown_kind_of_metric_is_named(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"metrics.test_weight_norn.kind: .* is not an option"):
        with_plugins(configure(), metrics={"test_weight_norn": {}})


def test_a_kind_of_the_program_itself_is_told_to_be_recorded_nowhere(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen to fail: a run went on without a word with other code of such a kind, as of a notebook, than it had begun with."""
    train_rank(configure("+callbacks.mine={kind:test_stop_at,step:2}"))
    assert capsys.readouterr().out.count(f"StopAtConfig: {__name__} defines it, no plugin, and nothing of its code is recorded") == 1
    train_rank(configure("run.name=plain", "trainer.max_steps=3"))
    assert "is recorded" not in capsys.readouterr().out
