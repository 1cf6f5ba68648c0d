"""How the ranks share the work on matrices of which each holds a slice. That several ranks step as one: test_two_processes.py."""

import math

import pytest
import torch

from lm.training.optim.slices import Cut, by_rows, by_slices, in_a_row, owners


@pytest.mark.parametrize("shape", [(7, 3), (2, 5), (4, 2, 3), (1, 1)])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_rows_are_cut_as_torch_chunks_them(shape: tuple[int, ...], world: int) -> None:
    cut, chunks = by_rows(shape, world), torch.zeros(shape).chunk(world)
    assert cut.sizes == [chunk.numel() for chunk in chunks] + [0] * (world - len(chunks))


@pytest.mark.parametrize("part", [11, 16, 40])
def test_weights_in_a_row_are_cut_where_a_rank_ends(part: int) -> None:
    shapes = [(3, 4), (2, 2, 3), (1, 8)]
    cuts, rank_of = in_a_row(shapes, part, 3), torch.arange(32) // part
    for cut, mine in zip(cuts, rank_of.split([12, 12, 8]), strict=True):
        assert cut.sizes == [int((mine == rank).sum()) for rank in range(3)]


def test_the_matrices_of_a_stack_have_the_slices_of_the_stack() -> None:
    parts = Cut((3, 2, 2), (0, 5, 5, 11, 12)).matrices()
    assert [part.sizes for part in parts] == [[4, 0, 0, 0], [1, 0, 3, 0], [0, 0, 3, 1]]
    assert {part.shape for part in parts} == {(2, 2)}


@pytest.mark.parametrize("world", [1, 2, 5])
def test_no_rank_has_more_to_do_than_its_part_and_one_matrix(world: int) -> None:
    costs = [int(x) for x in torch.randint(1, 1000, (40,), generator=torch.Generator().manual_seed(0))]
    loads = [sum(cost for cost, owner in zip(costs, owners(costs, world), strict=True) if owner == rank) for rank in range(world)]
    assert sum(loads) == sum(costs) and max(loads) <= sum(costs) / world + max(costs) / 3


@pytest.mark.parametrize(("shape", "dim"), [((6, 5), 0), ((5, 6), 1), ((4, 3, 2), 0), ((2, 4), 1)])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_slices_that_are_cut_again_are_whole_up_to_the_order_of_rows(shape: tuple[int, ...], dim: int, world: int) -> None:
    """Ranks lie in a grid, of which each line of 2 has the same rows of its slices."""
    whole, pieces = torch.arange(math.prod(shape)).view(shape), []
    for slices in zip(*(part.chunk(world) for part in whole.chunk(2, dim)), strict=True):
        pieces += [piece.flatten() for piece in slices]
    pieces += [whole.new_empty(0)] * (2 * world - len(pieces))
    cut = by_slices(shape, dim, 2, world)
    assert cut.sizes == [len(piece) for piece in pieces]
    found = cut.joined(pieces)
    assert found.shape == shape and (dim == 0 or torch.equal(found, whole))
    assert torch.equal(found.flatten(1).sort(0).values, whole.flatten(1).sort(0).values)
    assert all(torch.equal(*pair) for pair in zip(cut.parted(found), pieces, strict=True))
