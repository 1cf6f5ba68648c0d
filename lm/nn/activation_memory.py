"""What autograd saves of one token for the backward: each slot's config counts its own part, and lm.cost.memory adds them up."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

Precision = Literal["fp32", "bf16-mixed", "bf16-true", "fp16-mixed"]


class Activations(NamedTuple):
    """How many numbers are saved for the backward. Compiled code saves no casts, and computes some numbers again from others."""

    wide: int  # inputs of norms, which autocast leaves in float32
    narrow: int  # all others
    masks: int = 0  # of dropout and of xielu, one byte each
    casts: int = 0  # further copies that autocast makes of an input that several matrices read
    recomputed_wide: int = 0  # of the wide ones, those that compiled code computes again
    recomputed: int = 0  # the same of the narrow ones; below 0: it saves so many more, in place of wide ones

    def bytes(self, precision: Precision, compiled: bool = False) -> int:
        """Returns the size in bytes at this precision."""
        if compiled:
            return Activations(self.wide - self.recomputed_wide, self.narrow - self.recomputed, self.masks).bytes(precision)
        wide, narrow, cast = {"fp32": (4, 4, 0), "bf16-true": (2, 2, 0)}.get(precision, (4, 2, 2))
        return self.wide * wide + self.narrow * narrow + self.masks + self.casts * cast


def sum_activations(parts: Iterable[Activations]) -> Activations:
    """Returns the sum, field by field."""
    return Activations(*(sum(column) for column in zip(*parts, strict=True)))
