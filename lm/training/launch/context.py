"""Groups of ranks that share the same rows."""

from dataclasses import dataclass
from datetime import timedelta

from torch import distributed

from lm.ops.ranks.ulysses import Slices, Ulysses
from lm.training.launch.config import LaunchConfig
from lm.training.launch.ranks import Ranks


def slices_of(launch: LaunchConfig) -> Slices | None:
    """Returns this rank's slices of rows; None where it has whole rows. All ranks must call it.

    Neighbouring ranks share rows, so that their exchange stays on one machine where possible.
    """
    n = launch.context
    if n == 1:
        return None
    rank, timeout = distributed.get_rank(), timedelta(seconds=launch.timeout_s)
    groups = [distributed.new_group([*range(first, first + n)], timeout) for first in range(0, launch.world, n)]
    return Ulysses(groups[rank // n], rank % n, n)


@dataclass(frozen=True)
class GroupedRanks:
    """The ranks of a shared evaluation in groups of n; all ranks of a group do the same work and count as one."""

    ranks: Ranks
    n: int

    @property
    def rank(self) -> int:
        return self.ranks.rank // self.n

    @property
    def world(self) -> int:
        return self.ranks.world // self.n

    def total(self, *values: float) -> list[float]:
        return [value / self.n for value in self.ranks.total(*values)]
