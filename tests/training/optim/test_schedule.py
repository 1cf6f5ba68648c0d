import math
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.optim import SGD
from transformers import get_inverse_sqrt_schedule, get_wsd_schedule

from lm.cli.compose.compose import compose
from lm.errors import ConfigError
from lm.testing.runs import small_run
from lm.training.optim.schedule import ConstantConfig, CosineConfig, InverseSqrtConfig, LinearConfig, ScheduleConfig, WSDConfig

FORMS: dict[Literal["linear", "cosine", "sqrt"], str] = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}
ALL: list[ScheduleConfig] = [
    ConstantConfig(warmup_steps=10),
    LinearConfig(warmup_steps=10, final_frac=0.2),
    CosineConfig(warmup_steps=10, final_frac=0.2),
    WSDConfig(warmup_steps=10, decay_frac=0.3, final_frac=0.2),
    WSDConfig(warmup_steps=10, decay_frac=0.3, final_frac=0.2, decay="cosine"),
    WSDConfig(warmup_steps=10, decay_frac=0.3, final_frac=0.2, decay="sqrt"),
    InverseSqrtConfig(warmup_steps=10),
]
KINDS = [cfg.kind for cfg in ALL]


@pytest.mark.parametrize("wrong", [None, float("nan"), -1.0, "1"])
def test_a_schedule_that_gives_no_part_of_the_peak_is_refused(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of one's own may. Seen: a rate below 0 in training, and NaN told as a loss that diverged."""
    monkeypatch.setattr(ConstantConfig, "after_warmup", lambda self, step, max_steps: 1.0 if step < 50 else wrong)
    ConstantConfig().require(40)
    with pytest.raises(ValueError, match=r"schedule=constant gives .* for step 50 of 80, and a part of the peak is a number"):
        ConstantConfig().require(80)
    with pytest.raises(ConfigError, match=r"schedule=constant gives .* for step 5. of 200"):
        compose(["schedule=constant", "trainer.max_steps=200", "schedule.warmup_steps=0"]).config()


@pytest.mark.parametrize("cfg", ALL, ids=KINDS)
def test_warm_up_rises_by_equal_steps_from_above_zero_to_the_peak(cfg: ScheduleConfig) -> None:
    assert [cfg.factor(step, 100) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert cfg.factor(10, 100) == 1.0


@pytest.mark.parametrize("cfg", ALL[:-1], ids=KINDS[:-1])
def test_after_warm_up_it_never_rises_and_ends_at_its_final_part(cfg: ScheduleConfig) -> None:
    values = [cfg.factor(step, 100) for step in range(10, 101)]
    assert all(a >= b for a, b in pairwise(values))
    assert values[-1] == pytest.approx(1.0 if cfg.kind == "constant" else 0.2)
    assert cfg.factor(1000, 100) == values[-1]


@pytest.mark.parametrize("cfg", [LinearConfig(), CosineConfig(final_frac=0.0), WSDConfig()], ids=["linear", "cosine", "wsd"])
def test_no_step_is_spent_at_a_rate_of_zero(cfg: ScheduleConfig) -> None:
    for max_steps in (2, 3, 100):
        assert all(cfg.factor(step, max_steps) > 0 for step in range(max_steps))
        assert cfg.factor(max_steps, max_steps) == pytest.approx(0.0)


def test_the_shapes_are_a_line_half_a_cosine_and_a_plateau_with_a_line() -> None:
    assert LinearConfig().factor(25, 100) == pytest.approx(0.75)
    assert CosineConfig(final_frac=0.1).factor(25, 100) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    wsd = WSDConfig(warmup_steps=5, decay_frac=0.4)
    assert {wsd.factor(step, 100) for step in range(5, 61)} == {1.0}
    assert wsd.factor(80, 100) == pytest.approx(0.5)
    assert wsd.replace(decay="cosine").factor(70, 100) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert wsd.replace(decay="sqrt").factor(70, 100) == pytest.approx(0.5)


def test_shapes_that_transformers_has_too_are_its_own() -> None:
    """transformers counts its last step as the end, which comes after the last one here: its warm-up is (step / warmup_steps)."""
    weight = torch.nn.Parameter(torch.zeros(1))
    theirs = {
        InverseSqrtConfig(warmup_steps=10): get_inverse_sqrt_schedule(SGD([weight], lr=1.0), 10),
        **{
            WSDConfig(warmup_steps=10, decay_frac=0.4, final_frac=0.1, decay=decay): get_wsd_schedule(
                SGD([weight], lr=1.0), 10, 40, num_stable_steps=50, decay_type=name, min_lr_ratio=0.1
            )
            for decay, name in FORMS.items()
        },
    }
    for ours, scheduler in theirs.items():
        rate = scheduler.lr_lambdas[0]
        assert [ours.factor(step, 100) for step in range(10, 100)] == pytest.approx([rate(step) for step in range(10, 100)])


def test_a_decay_over_the_whole_run_starts_after_the_warm_up() -> None:
    wsd = WSDConfig(warmup_steps=20, decay_frac=1.0)
    assert wsd.factor(19, 100) == 1.0
    assert wsd.factor(60, 100) == pytest.approx(0.5)


def test_a_check_of_a_schedule_shortens_a_warm_up_that_its_run_does_not_hold(tmp_path: Path) -> None:
    """Seen to fail: with the 20 steps that a recipe had given it, which `check_kind` was told as the fault of a config."""
    cfg = small_run(WSDConfig(warmup_steps=20, decay_frac=0.25), {}, tmp_path)
    assert cfg.schedule == WSDConfig(warmup_steps=2, decay_frac=0.25) and cfg.trainer.max_steps == 6
