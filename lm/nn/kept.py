"""What autograd keeps of one token for the backward: each slot's config counts its own part, and lm.cost.memory adds them up."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

Precision = Literal["fp32", "bf16-mixed", "bf16-true"]


class Kept(NamedTuple):
    """How many numbers are kept for the backward. wide: inputs of norms, which autocast leaves in float32; narrow: all others; masks: of
    dropout, one byte each; casts: further copies that autocast makes of an input that several matrices read.

    What is compiled keeps no copies, and computes again what a few operations on other numbers give: again_wide and again say how many
    numbers fewer it keeps for that (below 0: more, in place of wide ones).
    """

    wide: int
    narrow: int
    masks: int = 0
    casts: int = 0
    again_wide: int = 0
    again: int = 0

    def bytes(self, precision: Precision, compiled: bool = False) -> int:
        """Returns the size in bytes at this precision."""
        narrow, casts = (4 if precision == "fp32" else 2), (2 * self.casts if precision == "bf16-mixed" else 0)
        if compiled:
            return Kept(self.wide - self.again_wide, self.narrow - self.again, self.masks).bytes(precision)
        return self.wide * (2 if precision == "bf16-true" else 4) + self.narrow * narrow + self.masks + casts


def together(parts: Iterable[Kept]) -> Kept:
    """Returns the sum, field by field."""
    return Kept(*(sum(column) for column in zip(*parts, strict=True)))
