"""The factor on the loss under which small gradients survive float16, and the float16 autocast of trainer.precision=fp16-mixed."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor

_FIRST, _LEAST = 2.0**16, 1.0
_GOOD = 2_000  # steps without an overflow until a larger factor is tried


class LossScale:
    """Halved by a step whose gradient overflows, which changes nothing, and doubled after 2,000 steps that did not (Micikevicius et al.
    2018, arXiv:1710.03740). A power of two, so that gradients are the same bits as without it where nothing overflows or underflows. It is
    decided on the device, with no host sync."""

    def __init__(self, factor: float | None = None, good: int = 0) -> None:
        """factor, good: of `state`, to go on with; None: those of a new run."""
        self.factor = torch.tensor(_FIRST if factor is None else factor)
        self.overflows = torch.tensor(False)  # of the current step
        self._good = torch.tensor(good)

    def to(self, device: torch.device) -> None:
        vars(self).update({name: value.to(device) for name, value in vars(self).items()})

    def unscale(self, grads: Iterable[Tensor]) -> None:
        """Divides the gradients by the factor."""
        if found := [*grads]:
            torch._foreach_mul_(found, 1 / self.factor)

    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Returns whether a step overflowed, a bool scalar: where the loss is finite, and the factor can still be halved."""
        self.overflows = torch.isfinite(loss) & ~torch.isfinite(norm) & (self.factor > _LEAST)
        return self.overflows

    def count(self) -> None:
        """Moves the factor for the next step; to be called once per step, when it is over."""
        good = torch.where(self.overflows, 0, self._good + 1)
        grows = good == _GOOD
        self.factor = torch.where(self.overflows, self.factor / 2, torch.where(grows, self.factor * 2, self.factor))
        self._good = torch.where(grows, 0, good)

    def state(self) -> tuple[float, int]:
        """Returns what a checkpoint keeps. Waits for the device."""
        return float(self.factor), int(self._good)


class Half(Precision):
    """Autocast to float16. Lightning's own would also scale the loss, and leave out steps by itself."""

    precision = "16-mixed"

    def __init__(self, device: str) -> None:
        """device: cpu or cuda."""
        self._device = device

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device, torch.float16)
