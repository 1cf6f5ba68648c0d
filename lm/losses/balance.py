"""What mixtures of experts add to a loss: their layers' losses per row, and the loads of their experts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from lm.losses.cross_entropy import LossSums
from lm.nn.context import Context, MoEStats
from lm.nn.head import Head

T = TypeVar("T")


@dataclass
class Balance:
    """What the experts of one forward add; None where there are no such losses, or no experts."""

    loss: Tensor | None  # ()
    loads: Tensor | None  # (MoE layers, e), tokens per expert

    @classmethod
    def of(cls, moe: MoEStats, share: Tensor | float) -> "Balance":
        """share: of each row, (b,), or of any, how many units of the loss it counts as, so that the mean over units is one over rows."""
        losses = (torch.stack(list(moe.losses.values())).sum(0) * share).sum() if moe.losses else None
        return cls(losses, torch.stack(list(moe.loads.values())) if moe.loads else None)

    def beside(self, sums: LossSums) -> LossSums:
        """Returns the sums with the experts' part."""
        if self.loss is None:
            return replace(sums, loads=self.loads)
        return replace(sums, total=sums.total + self.loss, router_loss=self.loss.detach(), loads=self.loads)


def with_balance(read: Callable[[Tensor, Head, Context], T], share: float) -> Callable[[Tensor, Head, Context], tuple[T, Balance]]:
    """A reader: what `read` returns, and what the experts add to a loss.  share: as in `Balance.of`."""

    def both(hidden: Tensor, head: Head, ctx: Context) -> tuple[T, Balance]:
        return read(hidden, head, ctx), Balance.of(ctx.moe, share)

    return both
