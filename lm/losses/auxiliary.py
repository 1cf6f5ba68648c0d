"""What layers add to a loss beside their output, as routers do and indexers: losses per row by name, and the loads of experts."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from lm.losses.cross_entropy import LossSums
from lm.nn.context import Context, Reported
from lm.nn.head import Head

T = TypeVar("T")


@dataclass
class Auxiliary:
    """What the layers of one forward add."""

    losses: dict[str, Tensor] = field(default_factory=dict)  # (), by name
    loads: Tensor | None = None  # (MoE layers, e), tokens per expert; None where there are no experts

    @classmethod
    def of(cls, reported: Reported, share: Tensor | float) -> "Auxiliary":
        """share: of each row, (b,), or of any, how many units of the loss it counts as, so that the mean over units is one over rows."""
        losses = {name: (torch.stack([*each.values()]).sum(0) * share).sum() for name, each in reported.losses.items()}
        return cls(losses, torch.stack([*reported.loads.values()]) if reported.loads else None)

    def beside(self, sums: LossSums) -> LossSums:
        """Returns the sums with this part."""
        total = sum(self.losses.values(), sums.total)
        return replace(sums, total=total, auxiliary={name: loss.detach() for name, loss in self.losses.items()}, loads=self.loads)


def with_auxiliary(read: Callable[[Tensor, Head, Context], T], share: float) -> Callable[[Tensor, Head, Context], tuple[T, Auxiliary]]:
    """A reader: what `read` returns, and what layers add to a loss.  share: as in `Auxiliary.of`."""

    def both(hidden: Tensor, head: Head, ctx: Context) -> tuple[T, Auxiliary]:
        return read(hidden, head, ctx), Auxiliary.of(ctx.reported, share)

    return both
