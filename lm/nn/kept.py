"""What autograd keeps of one token for the backward: each slot's config counts its own part, and lm.cost.memory adds them up."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

Precision = Literal["fp32", "bf16-mixed", "bf16-true"]


class Kept(NamedTuple):
    """How many numbers are kept for the backward. Compiled code keeps no casts, and computes some numbers again from others."""

    wide: int  # inputs of norms, which autocast leaves in float32
    narrow: int  # all others
    masks: int = 0  # of dropout, one byte each
    casts: int = 0  # further copies that autocast makes of an input that several matrices read
    again_wide: int = 0  # of the wide ones, those that compiled code computes again
    again: int = 0  # the same of the narrow ones; below 0: it keeps so many more, in place of wide ones

    def bytes(self, precision: Precision, compiled: bool = False) -> int:
        """Returns the size in bytes at this precision."""
        if compiled:
            return Kept(self.wide - self.again_wide, self.narrow - self.again, self.masks).bytes(precision)
        wide, narrow, cast = {"fp32": (4, 4, 0), "bf16-mixed": (4, 2, 2), "bf16-true": (2, 2, 0)}[precision]
        return self.wide * wide + self.narrow * narrow + self.masks + self.casts * cast


def together(parts: Iterable[Kept]) -> Kept:
    """Returns the sum, field by field."""
    return Kept(*(sum(column) for column in zip(*parts, strict=True)))
