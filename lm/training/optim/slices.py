"""Matrices that are sliced over the ranks: each is gathered on one rank, which works on it, and scattered again."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Cut:
    """Rank r holds the elements bounds[r] to bounds[r + 1] of a matrix, or of a stack of them, flattened."""

    shape: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """Returns how many elements each rank holds."""
        return [stop - start for start, stop in pairwise(self.bounds)]

    @property
    def cost(self) -> int:
        """Returns the cost of multiplying the matrix by its own transpose, up to a factor."""
        return self.shape[0] * self.shape[1] * min(self.shape)

    def matrices(self) -> list["Cut"]:
        """Returns the cuts of the stack's single matrices."""
        size = self.shape[-2] * self.shape[-1]
        starts = range(0, max(self.bounds[-1], 1), size)
        return [Cut(self.shape[-2:], tuple(min(max(at - start, 0), size) for at in self.bounds)) for start in starts]

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """Returns the whole matrix.  pieces: the flat slice of each rank."""
        return torch.cat([*pieces]).view(self.shape)

    def parted(self, whole: Tensor) -> Sequence[Tensor]:
        """Returns each rank's flat slice of a whole matrix."""
        return whole.reshape(-1).split(self.sizes)


@dataclass(frozen=True)
class Tiles(Cut):
    """Rank i * n + j holds the j-th of n equal parts of the columns, in the i-th part of the rows of a matrix."""

    rows: tuple[int, ...]
    n: int

    def matrices(self) -> list["Cut"]:
        return [self]

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        tiles = (piece.view(-1, self.shape[1] // self.n) for piece in pieces)
        return torch.cat([torch.cat(line, 1) for line in zip(*[tiles] * self.n, strict=True)])

    def parted(self, whole: Tensor) -> Sequence[Tensor]:
        return [tile.reshape(-1) for line in whole.split(self.rows) for tile in line.chunk(self.n, 1)]


def by_rows(shape: Sequence[int], world: int) -> Cut:
    """Returns how FSDP2 cuts a weight: into equal parts of its first dimension, of which the last ranks may get fewer rows, or none."""
    rows, rest = -(-shape[0] // world), torch.Size(shape[1:]).numel()
    return Cut(tuple(shape), tuple(min(rank * rows, shape[0]) * rest for rank in range(world + 1)))


def by_slices(shape: Sequence[int], dim: int, n: int, world: int) -> Cut:
    """Returns how n * world ranks hold a weight that is cut into n tensor-parallel slices along `dim` (0 or 1), each of which FSDP2 cuts
    again over `world` ranks. With dim=0 the rows, or a stack's matrices, come in another order, which does not matter to Muon: a matrix
    stays orthogonal when its rows are permuted."""
    mine = [size // n if at == dim else size for at, size in enumerate(shape)]
    sizes = by_rows(mine, world).sizes
    bounds = (0, *accumulate(size for size in sizes for _ in range(n)))
    return Cut(tuple(shape), bounds) if dim == 0 else Tiles(tuple(shape), bounds, tuple(size // mine[1] for size in sizes), n)


def in_a_row(shapes: Sequence[Sequence[int]], part: int, world: int) -> list[Cut]:
    """Returns how ZeRO cuts weights that are concatenated in one flat tensor, of which each rank holds `part` elements."""
    found, start = [], 0
    for shape in shapes:
        size = torch.Size(shape).numel()
        found.append(Cut(tuple(shape), tuple(min(max(rank * part - start, 0), size) for rank in range(world + 1))))
        start += size
    return found


def owners(costs: Sequence[int], world: int) -> list[int]:
    """Returns the owning rank of each matrix: the most expensive matrix first, each goes to the rank with the least work so far."""
    loads, found = [0] * world, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        found[i] = loads.index(min(loads))
        loads[found[i]] += costs[i]
    return found


class Exchange:
    """Gathers whole matrices on their owners and scatters them back, each by a single all-to-all. Every rank of the group creates it, with
    the same cuts."""

    def __init__(self, cuts: Sequence[Cut], group: ProcessGroup | None) -> None:
        self._cuts, self._group = cuts, group
        self._rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        owner = owners([cut.cost for cut in cuts], world)
        self._owned = [[i for i, of in enumerate(owner) if of == rank] for rank in range(world)]
        self._mine = [sum(cuts[i].sizes[self._rank] for i in owned) for owned in self._owned]  # elements of my slices, by owner
        self._theirs = [sum(cuts[i].sizes[rank] for i in self._owned[self._rank]) for rank in range(world)]  # of what I own, by rank

    def gather(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Returns the whole matrices that this rank owns.  slices: this rank's flat slice of every matrix."""
        sent = torch.cat([slices[i] for owned in self._owned for i in owned])
        received = sent.new_empty(sum(self._theirs))
        torch.distributed.all_to_all_single(received, sent, self._theirs, self._mine, self._group)
        owned = [self._cuts[i] for i in self._owned[self._rank]]
        pieces = received.split([cut.sizes[rank] for rank in range(len(self._theirs)) for cut in owned])
        return [cut.joined(pieces[n :: len(owned)]) for n, cut in enumerate(owned)]

    def scatter(self, matrices: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Returns this rank's flat slice of every matrix.  matrices: the whole ones that this rank owns; like: a tensor of their dtype and
        device."""
        parts = [self._cuts[i].parted(x) for i, x in zip(self._owned[self._rank], matrices, strict=True)]
        sent = [part[rank] for rank in range(len(self._theirs)) for part in parts]
        received = like.new_empty(sum(self._mine))
        torch.distributed.all_to_all_single(received, torch.cat([like.new_empty(0), *sent]), self._mine, self._theirs, self._group)
        order = [i for owned in self._owned for i in owned]
        pieces = received.split([self._cuts[i].sizes[self._rank] for i in order])
        return [pieces[at] for at in sorted(range(len(order)), key=order.__getitem__)]
