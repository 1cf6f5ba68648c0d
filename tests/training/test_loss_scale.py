"""trainer.precision=fp16-mixed: the factor on the loss, and steps whose gradient overflows."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer

from lm.errors import ConfigError, NumericsError
from lm.training import loss_scale
from lm.training.loss_scale import LossScale
from lm.training.module import TrainModule
from lm.training.run import train_rank
from tests.training.conftest import Configure, read

HALF = ("trainer.precision=fp16-mixed", "trainer.log_every=1", "optim=adamw", "schedule.warmup_steps=1", "model.init.out_scale=1")
FINITE, OVER = torch.tensor(1.0), torch.tensor(math.inf)


def after(scale: LossScale, *norms: torch.Tensor, loss: torch.Tensor = FINITE) -> tuple[float, int]:
    for norm in norms:
        scale.judge(loss, norm)
        scale.count()
    return scale.state()


def test_it_halves_where_a_gradient_overflows_and_doubles_after_so_many_steps_that_did_not() -> None:
    scale = LossScale()
    assert after(scale, OVER, OVER, FINITE) == (2.0**14, 1)
    assert after(scale, *[FINITE] * 1_998) == (2.0**14, 1_999)
    assert after(LossScale(*scale.state()), OVER) == (2.0**13, 0), "the next one would have doubled it"
    assert after(scale, FINITE) == (2.0**15, 0)


def test_a_loss_that_is_not_finite_or_a_gradient_at_the_least_factor_is_no_overflow() -> None:
    scale = LossScale(2.0)
    assert not scale.judge(OVER, OVER) and after(scale, OVER, loss=OVER)[0] == 2.0
    assert after(scale, OVER)[0] == 1.0 and not scale.judge(FINITE, OVER)


def test_unscaled_gradients_are_the_same_bits() -> None:
    scale, grads = LossScale(2.0**10), [torch.randn(5), torch.randn(2, 3)]
    scaled = [grad * 2.0**10 for grad in grads]
    scale.unscale(iter(scaled))
    scale.unscale([])
    assert all(map(torch.equal, scaled, grads))


class Seen(Callback):
    """Weights and the next factor before the first step and behind each."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.factors: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.look(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if pl_module.stepped:
            self.look(pl_module)

    def look(self, pl_module: Any) -> None:
        self.weights.append(pl_module.model.embed.weight.detach().clone())
        self.factors.append(float(pl_module.loss_scale.factor))


def test_a_step_that_overflows_changes_nothing_and_is_none_that_the_run_ends_for(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With numerics.skip_in_a_row=0, which ends a run at the first bad step."""
    monkeypatch.setattr(loss_scale, "_FIRST", 2.0**40)
    seen = Seen()
    summary = train_rank(configure(*HALF, "trainer.max_steps=30"), callbacks=[seen])
    still = [torch.equal(*pair) for pair in zip(seen.weights, seen.weights[1:], strict=False)]
    assert still == [after < before for before, after in zip(seen.factors, seen.factors[1:], strict=False)]
    assert 3 <= sum(still) < 25 and seen.factors[-1] == 2.0 ** (40 - sum(still))
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["loss_scale"] for line in lines if "loss_scale" in line] == seen.factors[1:]
    assert not [line for line in lines if line.get("event") in ("skipped", "not finite")] and summary["steps"] == 30


def test_a_gradient_that_overflows_at_the_least_factor_ends_the_run(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "_FIRST", 4.0)
    own = TrainModule.judge
    monkeypatch.setattr(TrainModule, "judge", lambda module, norm: own(module, norm * math.inf))
    with pytest.raises(NumericsError, match=r"train: step 3 has loss .* and gradient norm inf"):
        train_rank(configure(*HALF))


def test_deepspeed_refuses_it_by_name(configure: Configure) -> None:
    with pytest.raises(
        ConfigError, match=r"strategy=zero2: float16 needs a loss scale.* Set trainer\.precision=bf16-mixed, or strategy=fsdp"
    ):
        train_rank(configure(*HALF, "strategy=zero2"))
    with pytest.raises(ConfigError, match=r"trainer\.float8=true: .* Set trainer\.precision=bf16-mixed"):
        train_rank(configure(*HALF, "trainer.float8=true"))
