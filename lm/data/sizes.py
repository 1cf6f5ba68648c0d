"""How many rows each step reads: data.global_batch, and fewer in the phases of data.ramp before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Self

from pydantic import Field

from lm.schema import MOST, Config


class Smaller(Config):
    """A smaller batch for the first steps."""

    until_step: int = Field(gt=0)
    """The step up to which it holds, after the phase before; behind the last phase data.global_batch holds."""
    global_batch: int = Field(gt=0, le=MOST)
    """Rows per optimizer step until then."""


def require_rising(key: str, ends: Sequence[int]) -> None:
    """Raises ValueError unless each phase ends behind the one before.  key: of the list of phases."""
    if list(ends) != sorted(set(ends)):
        raise ValueError(f"{key}: until_step is {', '.join(map(str, ends))}, and must rise from phase to phase. Sort them.")


@dataclass(frozen=True)
class Sizes:
    """Rows of the steps of a run over all ranks.  last: of those behind all phases.  phases: (end, rows) of those before, in order."""

    last: int
    phases: tuple[tuple[int, int], ...] = ()

    def of(self, step: int) -> int:
        """Returns the rows of a step, counted from 0."""
        return next((rows for end, rows in self.phases if step < end), self.last)

    def all(self) -> list[int]:
        """Returns the rows of the steps of each phase, and of those behind."""
        return [*(rows for _, rows in self.phases), self.last]

    def before(self, step: int) -> int:
        """Returns the rows of all steps before this one."""
        ends = [0, *(min(end, step) for end, _ in self.phases), step]
        return sum(rows * (stop - start) for (start, stop), rows in zip(pairwise(ends), self.all(), strict=True))

    def until(self, rows: Fraction) -> int:
        """Returns how many steps read so many rows, the last of them perhaps more."""
        start = next((end for end, _ in reversed(self.phases) if self.before(end) < rows), 0)
        return start + ceil((rows - self.before(start)) / self.of(start))

    def each(self, count: Callable[[int], int]) -> Self:
        """Returns the same phases with what this makes of the rows of a step, such as its micro-batches."""
        return type(self)(count(self.last), tuple((end, count(rows)) for end, rows in self.phases))

    def places(self, step: int) -> range:
        """Returns where the rows of a step, counted from 0, stand in the order of all that the run reads."""
        start = self.before(step)
        return range(start, start + self.of(step))
