"""Numerical faults: which steps are not finite and must change nothing, and which losses are spikes."""

import statistics

import torch
from pydantic import Field
from torch import Tensor

from lm.schema import Config

_KEPT = 64  # bad steps whose numbers are kept on the device until the host reads them
_WINDOW, _FEWEST = 16, 4  # most and fewest recent losses that a loss is compared with


class NumericsConfig(Config):
    """What happens where a loss or gradient is not finite, or a loss leaps."""

    skip_in_a_row: int = Field(0, ge=0)
    """Steps in a row that are left out if loss or gradient is not finite, their rows named in metrics.jsonl. 0: stop at the first."""
    spike_factor: float | None = Field(2.0, gt=1)
    """A logged loss of so many times the median of the 16 before is an event in metrics.jsonl. null: none is."""
    rollbacks: int = Field(0, ge=0)
    """So often may such a loss take the run back to its last checkpoint, to go on without the rows since."""


class StepJudge:
    """Counts non-finite ("bad") steps on the device, so that no step waits for the host. After more than `allowed` in a row every step is
    refused."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self.refused = torch.zeros((), dtype=torch.bool)  # the current step changes nothing
        self._bad = torch.zeros((), dtype=torch.bool)
        self._steps = torch.full((_KEPT,), -1, dtype=torch.int64)
        self.n_bad = torch.zeros((), dtype=torch.int64)
        self._streak = torch.zeros((), dtype=torch.int64)
        self.loss = self.norm = self.labels = torch.zeros(())  # of the last bad step

    def to(self, device: torch.device) -> None:
        vars(self).update({name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)})

    @property
    def streak(self) -> int:
        """Bad steps in a row up to now. Waits for the device."""
        return int(self._streak)

    @streak.setter
    def streak(self, steps: int) -> None:
        self._streak = torch.full_like(self._streak, min(steps, self._allowed))  # a resumed run may allow fewer

    @property
    def stuck(self) -> Tensor:
        return self._streak > self._allowed

    def judge(self, loss: Tensor, norm: Tensor, labels: Tensor, excused: Tensor | None = None) -> Tensor:
        """Returns the optimizer's `found_inf` for a step with this loss over `labels` label tokens and this gradient norm. May be called
        several times per step.  excused: whether the step is refused without being a bad one."""
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        bad = ~finite if excused is None else ~finite & ~excused
        self.refused, self._bad = ~finite | self.stuck, bad & ~self.stuck
        self.loss, self.norm = torch.where(self._bad, loss, self.loss), torch.where(self._bad, norm, self.norm)
        self.labels = torch.where(self._bad, labels, self.labels)
        return self.refused.to(torch.float32)

    def count(self, step: int) -> None:
        """Counts the step that was judged last; to be called once per step, when it is over."""
        here = torch.arange(_KEPT, device=self._bad.device) == self.n_bad % _KEPT
        self._steps = torch.where(here & self._bad, step, self._steps)
        self.n_bad = self.n_bad + self._bad
        self._streak = torch.where(self.stuck, self._streak, torch.where(self._bad, self._streak + 1, 0))

    def bad_steps(self, first: int) -> list[int]:
        """Returns the numbers of the bad steps from the `first`-th one on, at most the last 64. Waits for the device."""
        steps, n = self._steps.tolist(), int(self.n_bad)
        return [steps[number % _KEPT] for number in range(max(first, n - _KEPT), n)]


def is_spike(loss: float, recent: list[float], factor: float | None) -> bool:
    """Returns whether a loss exceeds `factor` times the median of the recent ones, where these are enough."""
    return factor is not None and len(recent) >= _FEWEST and loss > factor * statistics.median(recent)


def with_loss(recent: list[float], loss: float) -> list[float]:
    """Returns the recent losses with this one, without the oldest where they would be too many."""
    return [*recent, loss][-_WINDOW:]
