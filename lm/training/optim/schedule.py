"""Learning rate schedules."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import Field

from lm.schema import Slot


def _half_cosine(done: float) -> float:
    return (1 - math.cos(math.pi * done)) / 2


_FORMS: dict[str, Callable[[float], float]] = {"linear": lambda done: done, "cosine": _half_cosine, "sqrt": math.sqrt}


class ScheduleConfig(Slot, group="schedule"):
    """How the learning rate goes with the steps, as parts of its peak."""

    of_length: ClassVar[bool] = True
    """Whether the rate of a step depends on how long the run is."""

    warmup_steps: int = Field(0, ge=0)
    """Steps of linear rise to the peak; a text such as 3% is a share of the run."""

    def factor(self, step: int, max_steps: int) -> float:
        """Returns the learning rate of a step, counted from 0, as a part of the peak. Warm-up is (step + 1) / warmup_steps."""
        return (step + 1) / self.warmup_steps if step < self.warmup_steps else self.after_warmup(step, max_steps)

    def require(self, max_steps: int) -> None:
        """Raises ValueError where the rate of a step is no part of the peak, as that of a schedule of one's own may be; looks at 100."""
        for step in range(0, max_steps, 1 + max_steps // 100):
            factor = self.factor(step, max_steps)
            if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
                rule = "and a part of the peak is a number, 0 or above"
                raise ValueError(f"schedule={self.kind} gives {factor!r:.80} for step {step:,} of {max_steps:,}, {rule}. Correct it.")

    def same(self, step: int, max_steps: int, other: int) -> bool:
        """Says whether a step, counted from 0, has the same rate in runs of two lengths."""
        return self.factor(step, max_steps) == self.factor(step, other)

    @abstractmethod
    def after_warmup(self, step: int, max_steps: int) -> float:
        """Returns the learning rate of a step after the warm-up, as a part of the peak."""


class ConstantConfig(ScheduleConfig):
    """Warm-up, then the peak to the end."""

    of_length = False

    kind: Literal["constant"] = "constant"

    def after_warmup(self, step: int, max_steps: int) -> float:
        return 1.0


class FreeConfig(ScheduleConfig):
    """Warm-up, then the peak to the end, as the weights are averaged instead: gradients are those at a point between the optimizer's
    weights and their average, which is validated and exported (Schedule-Free, Defazio et al. 2024, arXiv:2405.15682)."""

    of_length = False

    kind: Literal["free"] = "free"
    beta: float = Field(0.9, ge=0, lt=1)
    """How far the point of the gradients is on the way from the optimizer's weights to their average; it takes the place of a momentum.
    0: at the weights."""

    def after_warmup(self, step: int, max_steps: int) -> float:
        return 1.0

    def share(self, step: int) -> float:
        """Returns what part of the average is of the weights after a step, counted from 0: each counts by its rate squared."""
        rising = min(step + 1, self.warmup_steps)
        squares = rising * (rising + 1) * (2 * rising + 1) / 6 / max(self.warmup_steps, 1) ** 2  # of the rates while they rise
        return self.factor(step, 0) ** 2 / (squares + step + 1 - rising)


class InverseSqrtConfig(ScheduleConfig):
    """Warm-up, then the peak times the square root of warmup_steps / step (Vaswani et al. 2017, arXiv:1706.03762, section 5.3), for runs
    whose end is not known."""

    of_length = False

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"

    def after_warmup(self, step: int, max_steps: int) -> float:
        return math.sqrt(max(self.warmup_steps, 1) / max(step, 1))


class LinearConfig(ScheduleConfig):
    """Warm-up, then a straight line down."""

    kind: Literal["linear"] = "linear"
    final_frac: float = Field(0.0, ge=0, le=1)
    """Learning rate that the decay ends at, as a part of the peak."""

    def after_warmup(self, step: int, max_steps: int) -> float:
        return 1 - (1 - self.final_frac) * _done(step, self.warmup_steps, max_steps)


class CosineConfig(ScheduleConfig):
    """Warm-up, then half a cosine down (Loshchilov & Hutter 2016, arXiv:1608.03983)."""

    kind: Literal["cosine"] = "cosine"
    final_frac: float = Field(0.1, ge=0, le=1)
    """Learning rate that the decay ends at, as a part of the peak."""

    def after_warmup(self, step: int, max_steps: int) -> float:
        return 1 - (1 - self.final_frac) * _half_cosine(_done(step, self.warmup_steps, max_steps))


class WSDConfig(ScheduleConfig):
    """Warm-up, stable, decay over the last part (Hu et al. 2024, arXiv:2404.06395)."""

    kind: Literal["wsd"] = "wsd"
    decay_frac: float = Field(0.5, gt=0, le=1)
    """Part of all steps spent decaying."""
    decay: Literal["linear", "cosine", "sqrt"] = "linear"
    """Its form: a line, half a cosine, or 1 - sqrt(part done), which falls fast at first (Hägele et al. 2024, arXiv:2405.18392)."""
    final_frac: float = Field(0.0, ge=0, le=1)
    """Learning rate that the decay ends at, as a part of the peak."""

    def after_warmup(self, step: int, max_steps: int) -> float:
        start = max(self.warmup_steps, max_steps - round(self.decay_frac * max_steps))
        return 1 - (1 - self.final_frac) * _FORMS[self.decay](_done(step, start, max_steps))


def _done(step: int, start: int, max_steps: int) -> float:
    """Returns the part of a decay that is done: 1 at `max_steps`, which comes after the last step, so that no step has a rate of 0."""
    return min(max((step - start) / max(max_steps - start, 1), 0.0), 1.0)
