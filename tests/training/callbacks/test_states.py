"""What callbacks of one's own keep over a kill and a rollback, and what of Lightning's is refused since it would have no effect."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import LambdaCallback, Timer

from lm.errors import ConfigError
from lm.storage.checkpoint import CheckpointReader, checkpoints
from lm.training.callbacks.states import states_of
from lm.training.run import train_rank
from tests.training.conftest import Before, Configure, read


class Counting(Callback):
    """Counts in three hooks of a step, of which one is the last of all."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"before": 0, "after": 0, "steps": []}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.seen["before"] += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if pl_module.stepped:
            self.seen["after"] += 1
            self.seen["steps"].append(pl_module.step)
            assert trainer.global_step == pl_module.step


@pytest.mark.parametrize("background", [False, True])
def test_the_state_of_a_callback_goes_on_where_its_checkpoint_was_saved(configure: Configure, background: bool) -> None:
    """The step of the save counts; the two after it, which are trained again, count once. The state does not change while it is written.
    Lightning's own step goes on too."""
    cfg = configure(f"checkpoint.background={background}".lower())
    with pytest.raises(ZeroDivisionError):
        train_rank(cfg, callbacks=[Counting(), Before(7, lambda module: 1 // 0)])
    again = Counting()
    assert train_rank(cfg, callbacks=[again])["steps"] == 12
    assert again.seen == {"before": 12, "after": 12, "steps": [*range(1, 13)]}


def test_a_rollback_takes_the_states_of_callbacks_back(configure: Configure, tmp_path: Path) -> None:
    counting = Counting()
    spike = Before(7, lambda module: module.model.embed.weight.data.mul_(50))
    once = Before(7, lambda module: setattr(spike, "step", -1))
    train_rank(configure("numerics.rollbacks=1", "numerics.spike_factor=1.5", "trainer.val_every=100"), callbacks=[counting, spike, once])
    (back,) = [line for line in read(tmp_path / "run" / "metrics.jsonl") if line.get("event") == "rolled back"]
    assert (back["step"], back["from_step"]) == (4, 7)
    assert counting.seen["steps"] == [*range(1, 13)]


@pytest.mark.slow
def test_a_checkpoint_without_states_is_as_before_and_one_with_the_state_of_another_callback_says_so(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    train_rank(configure("trainer.max_steps=4"))
    assert "callbacks" not in CheckpointReader(checkpoints(folder)[0]).meta
    train_rank(configure("trainer.max_steps=8"), callbacks=[Counting()])
    assert CheckpointReader(checkpoints(folder)[0]).meta["callbacks"] == {"Counting": {"before": 4, "after": 4, "steps": [5, 6, 7, 8]}}
    capsys.readouterr()
    train_rank(configure())
    assert "callbacks: the checkpoint has a state of Counting, which is none of them now" in capsys.readouterr().out


def test_lightnings_timer_counts_the_time_before_a_kill(configure: Configure) -> None:
    """As in Lightning: the time of all starts together."""
    train_rank(configure("trainer.max_steps=4"), callbacks=[before := Timer(timedelta(days=1))])
    train_rank(configure("trainer.max_steps=8"), callbacks=[after := Timer(timedelta(days=1))])
    assert after.time_elapsed() > before.time_elapsed() > 0
    over = Timer(timedelta(seconds=after.time_elapsed() / 2))
    assert train_rank(configure(), callbacks=[over])["steps"] < 12


def test_a_state_that_could_be_saved_but_not_read_again_is_refused() -> None:
    """Seen: checkpoints that no resume could read; with more levels, a RecursionError."""
    for levels in (150, 2000, 100_000):
        counting = Counting()
        for _ in range(levels):
            counting.seen = {"in": counting.seen}
        with pytest.raises(ConfigError, match=r"^callbacks: state_dict\(\) of Counting gave \{'in': .* 100 levels at most"):
            states_of([counting])
    counting.seen = {"long": "a" * (64 << 20)}
    with pytest.raises(ConfigError, match=r"'aaa.* of 64 MiB"):
        states_of([counting])


@pytest.mark.parametrize("state", [{"best": float("inf")}, {"best": torch.zeros(2)}, {1: 2}, {"pair": (1, 2)}, {"n": 1 << 70}, [1]])
def test_a_state_that_json_does_not_give_back_is_refused_before_the_first_step(configure: Configure, state: Any, tmp_path: Path) -> None:
    class Keeps(Callback):
        def state_dict(self) -> Any:
            return state

    with pytest.raises(ConfigError, match=r"^callbacks: state_dict\(\) of Keeps gave .*no pickle\. Convert it"):
        train_rank(configure(), callbacks=[Keeps()])
    assert not (tmp_path / "run").exists()


def test_two_states_under_one_name_are_refused(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"^callbacks: 2 keep a state as Counting, .*state_key of its own"):
        train_rank(configure(), callbacks=[Counting(), Counting()])


class Validated(Callback):
    def on_validation_epoch_end(self, *args: Any) -> None: ...


class Saves(Timer):
    def on_save_checkpoint(self, *args: Any) -> None: ...


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (Validated(), "on_validation_epoch_end of Validated would never be called: .*on_train_batch_end"),
        (LambdaCallback(on_test_end=print), "on_test_end of LambdaCallback would never"),
        (LambdaCallback(on_predict_start=print), "on_predict_start of LambdaCallback .*Leave it out"),
        (Saves(), r"on_save_checkpoint of Saves .*state_dict\(\)"),
    ],
)
def test_hooks_that_would_never_be_called_are_refused(configure: Configure, callback: Callback, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^callbacks: {said}"):
        train_rank(configure(), callbacks=[callback])


def test_what_would_be_logged_nowhere_is_refused(configure: Configure) -> None:
    class Logs(Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            self.log_dict({"mine": 1.0})  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match=r"^callbacks: log\('mine'\) .*journal\.record\(\{'step': module\.step, 'mine': value\}\)"):
        train_rank(configure(), callbacks=[Logs()])


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"])
def test_a_callback_that_comes_to_an_end_does_not_send_the_run_back_to_its_first_rows(configure: Configure, hook: str) -> None:
    """Seen: the rows of the first steps again, without a word."""
    notes = iter([1, 2, 3, 4, 5])
    with pytest.raises(ConfigError, match=r"^train: a callback .* raised StopIteration after step [56], .*give next\(\) a default"):
        train_rank(configure(), callbacks=[LambdaCallback(**{hook: lambda *args: next(notes)})])


@pytest.mark.slow
def test_a_callback_may_change_the_rate_where_it_has_an_effect_only(configure: Configure, tmp_path: Path) -> None:
    def halve(key: str) -> Callable[..., None]:
        def change(trainer: Any, module: Any, *args: Any) -> None:
            for params in trainer.optimizers[0].param_groups:
                params[key] /= 2

        return change

    changes = ["schedule=constant", "schedule.warmup_steps=0", "optim=adamw", "optim.lr=0.01", "trainer.max_steps=3"]

    def rates(name: str, **hooks: Callable[..., None]) -> list[float]:
        train_rank(configure(*changes, f"run.name={name}"), callbacks=[LambdaCallback(**hooks)])
        return [line["lr"] for line in read(tmp_path / name / "metrics.jsonl") if "lr" in line]

    assert rates("step", on_before_optimizer_step=halve("lr")) == [0.005, 0.005, 0.005]
    assert rates("peak", on_train_batch_end=halve("peak_lr")) == [0.01, 0.005, 0.0025]
    for hook in ("on_train_start", "on_train_batch_start", "on_train_batch_end"):
        with pytest.raises(ConfigError, match=r"^callbacks: lr was changed between steps, .*on_before_optimizer_step, or peak_lr"):
            rates(hook, **{hook: halve("lr")})


@pytest.mark.parametrize("record", [{"x": 1.0}, {"step": 3.0, "x": 1.0}, {"step": None}])
def test_a_record_without_a_step_is_refused(configure: Configure, record: dict[str, Any], tmp_path: Path) -> None:
    """Seen to fail: the line was written, and from then on the run could neither be resumed nor compared."""
    with pytest.raises(ConfigError, match=r"record: .* has no whole number as its step\. Write \{'step': module\.step"):
        train_rank(configure(), callbacks=[Before(7, lambda module: module.run.journal.record(record))])
    assert all(isinstance(line["step"], int) for line in read(tmp_path / "run" / "metrics.jsonl"))
    assert train_rank(configure())["steps"] == 12
