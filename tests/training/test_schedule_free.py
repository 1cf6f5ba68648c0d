"""schedule=free: averages in the place of a decay, for any optimizer, against another implementation and its formula."""

from pathlib import Path

import pytest
import torch
from pytorch_optimizer import ScheduleFreeWrapper
from torch import Tensor, nn

from lm.cli.compose.compose import compose_config
from lm.errors import ConfigError
from lm.storage.checkpoint import CheckpointReader
from lm.training.optim.adamw import AdamWConfig
from lm.training.optim.base import OptimConfig, begin_state, set_lr
from lm.training.optim.lion import LionConfig
from lm.training.optim.schedule import FreeConfig
from lm.training.optim.sgd import SGDConfig
from lm.training.run import train_rank
from lm.training.strategies.base import Strategy
from lm.training.weights.averages import ScheduleFree
from tests.training.conftest import Configure, Stop, results, settled
from tests.training.optim.optimizers import built
from tests.training.test_finetune import child
from tests.training.test_steps import initial, weights

FREE = ("schedule=free", "schedule.warmup_steps=3", "model.dropout=0")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))


def backward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    nn.functional.cross_entropy(model(x), torch.arange(8) % 4).backward()


def beside(schedule: FreeConfig, cfg: OptimConfig, model: nn.Module) -> tuple[torch.optim.Optimizer, ScheduleFree]:
    optimizer = built(cfg, model.named_parameters(), ())
    begin_state(optimizer)
    return optimizer, ScheduleFree(Strategy(), model, Strategy().weights(model), schedule)


@pytest.mark.parametrize("beta", [0.9, 0.5])
@pytest.mark.parametrize(
    "cfg",
    [AdamWConfig(lr=0.02, beta1=0.0, weight_decay=0.1), SGDConfig(lr=0.3, momentum=0.5), LionConfig(lr=0.01)],
    ids=lambda cfg: cfg.kind,
)
def test_steps_are_those_of_another_implementation(cfg: OptimConfig, beta: float) -> None:
    schedule = FreeConfig(warmup_steps=4, beta=beta)
    ours, theirs = net(), net()
    optimizer, averages = beside(schedule, cfg, ours)
    base, _ = beside(schedule, cfg, theirs)
    wrapped = ScheduleFreeWrapper(base, momentum=beta)
    wrapped.train()
    for step in range(9):
        for one, model in ((optimizer, ours), (base, theirs)):
            set_lr(one, schedule.factor(step, 9))
            backward(model, step)
        averages.before()
        optimizer.step()
        averages.update(step, torch.tensor(False))
        wrapped.step()
        torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()], rtol=1e-4, atol=1e-5)
    wrapped.eval()
    with averages.swapped():
        torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_each_step_counts_by_its_rate_squared(warmup: int) -> None:
    schedule = FreeConfig(warmup_steps=warmup)
    squares = [schedule.factor(step, 30) ** 2 for step in range(30)]
    assert [schedule.share(step) for step in range(30)] == pytest.approx([squares[i] / sum(squares[: i + 1]) for i in range(30)])


def test_a_step_that_is_refused_changes_nothing() -> None:
    model = net()
    optimizer, averages = beside(FreeConfig(), AdamWConfig(), model)
    optimizer.found_inf = torch.tensor(0.0)
    state = [*model.parameters(), *(piece.tensor for piece in averages.pieces())]
    for step in range(4):
        backward(model, step)
        before = [tensor.detach().clone() for tensor in state]
        averages.before()
        optimizer.found_inf.fill_(step == 2)
        optimizer.step()
        averages.update(step, optimizer.found_inf.bool())
        assert all(map(torch.equal, before, state)) is (step == 2)


def test_what_is_handed_on_is_the_average_of_the_iterates(configure: Configure, tmp_path: Path) -> None:
    train_rank(configure(*FREE, "trainer.max_steps=6", "checkpoint.every=1", "checkpoint.keep_last=9", "optim.lr=0.05"))
    schedule, average = FreeConfig(warmup_steps=3), initial(tmp_path, "run")
    for step in range(6):
        reader = CheckpointReader(tmp_path / "run" / "checkpoints" / f"step-{step + 1:08d}")
        iterate = {name: reader.read(name, "iterate").view(a.shape) for name, a in average.items()}
        average = {name: a + schedule.share(step) * (iterate[name] - a) for name, a in average.items()}
        computed = {name: 0.1 * iterate[name] + 0.9 * a for name, a in average.items()}
        torch.testing.assert_close({name: reader.read(name).view(a.shape) for name, a in average.items()}, computed, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights(tmp_path, "run"), average, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "options", [["optim=adamw", "optim.beta1=0"], ["optim=muon", "trainer.precision=bf16-true"]], ids=["adamw", "muon"]
)
def test_a_stopped_run_goes_on_bitwise(configure: Configure, stop: Stop, tmp_path: Path, options: list[str]) -> None:
    train_rank(configure(*FREE, *options, "run.name=whole"))
    stop(configure(*FREE, *options), 6)
    train_rank(configure(*FREE, *options))
    assert results(tmp_path / "run") == results(tmp_path / "whole")


def test_a_run_whose_weights_are_averaged_so_goes_on_by_no_other_schedule(configure: Configure, stop: Stop, tmp_path: Path) -> None:
    """Their rates are the same, and what they train is not."""
    stop(configure(*FREE), 6)
    for other in (["schedule=constant", *FREE[1:]], [*FREE, "schedule.beta=0.8"]):
        with pytest.raises(ConfigError, match=r"the run exists with another config \(schedule\.(kind|beta)"):
            train_rank(configure(*other))


def test_a_run_from_its_state_begins_at_the_weights_that_the_optimizer_has_moved(configure: Configure, tmp_path: Path) -> None:
    train_rank(configure(*FREE, "optim=adamw", "trainer.max_steps=4"))
    source = tmp_path / "run/checkpoints/step-00000004"
    still = ["optim=adamw", "optim.lr=1e-30", "schedule=constant", "init_optimizer=true"]
    train_rank(compose_config(settled(*child(tmp_path / "run"), *still, f"init_from={source}")))
    reader = CheckpointReader(source)
    found: dict[str, Tensor] = weights(tmp_path, "child")
    torch.testing.assert_close(found, {name: reader.read(name, "iterate").view(w.shape) for name, w in found.items()})
    assert not torch.equal(found["embed.weight"], reader.read("embed.weight"))


def test_a_momentum_beside_its_own_is_told(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    """But not where schedule.beta=0 takes no place of one."""
    for i, given in enumerate((["optim.beta1=0.9"], ["optim.beta1=0"], ["optim.beta1=0.9", "schedule.beta=0"])):
        train_rank(configure(*FREE, "optim=adamw", *given, "trainer.max_steps=4", f"run.name=b{i}"))
        found = capsys.readouterr().out
        assert ("optim.beta1=0.9: schedule.beta=0.9 takes the place of that momentum; try optim.beta1=0" in found) == (i == 0)
        assert ("of that momentum" in found) == (i == 0)


def test_two_averages_at_once_are_refused(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.ema_decay=0\.9 and schedule=free both average the weights\. Drop one\."):
        configure(*FREE, "trainer.ema_decay=0.9")
