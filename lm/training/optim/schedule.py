import math
from typing import Literal

from pydantic import Field

from lm.config import Slot


class ScheduleConfig(Slot, group="schedule"):
    """How the learning rate goes with the steps, as parts of its peak."""

    warmup_steps: int = Field(0, ge=0)
    """Steps of linear rise to the peak."""


class ConstantConfig(ScheduleConfig):
    """Warm-up, then the peak to the end."""

    kind: Literal["constant"] = "constant"


class LinearConfig(ScheduleConfig):
    """Warm-up, then a straight line down."""

    kind: Literal["linear"] = "linear"
    final_frac: float = Field(0.0, ge=0, le=1)
    """Learning rate that the decay ends at, as a part of the peak."""


class CosineConfig(ScheduleConfig):
    """Warm-up, then half a cosine down (Loshchilov & Hutter 2016, arXiv:1608.03983)."""

    kind: Literal["cosine"] = "cosine"
    final_frac: float = Field(0.1, ge=0, le=1)
    """Learning rate that the decay ends at, as a part of the peak."""


class WSDConfig(ScheduleConfig):
    """Warm-up, stable, linear decay over the last part (Hu et al. 2024, arXiv:2404.06395)."""

    kind: Literal["wsd"] = "wsd"
    decay_frac: float = Field(0.5, gt=0, le=1)
    """Part of all steps spent decaying."""
    final_frac: float = Field(0.0, ge=0, le=1)
    """Learning rate that the decay ends at, as a part of the peak."""


def factor(cfg: ScheduleConfig, step: int, max_steps: int) -> float:
    """Learning rate of a step, counted from 0, as a part of the peak.

    Warm-up is (step + 1) / warmup_steps. A decay reaches final_frac at `max_steps`, one after the last step, so that no step is
    spent at a rate of 0.
    """
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    if isinstance(cfg, ConstantConfig):
        return 1.0
    decay_steps = round(cfg.decay_frac * max_steps) if isinstance(cfg, WSDConfig) else max_steps
    start = max(cfg.warmup_steps, max_steps - decay_steps)
    done = min(max((step - start) / max(max_steps - start, 1), 0.0), 1.0)
    if isinstance(cfg, CosineConfig):
        done = (1 - math.cos(math.pi * done)) / 2
    return 1 - (1 - cfg.final_frac) * done
