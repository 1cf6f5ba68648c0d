import numpy as np
import pytest

from lm.data.order import permuted, rows_at, spread, uniforms
from lm.data.sizes import Sizes


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 1000, 65_537])
def test_permuted_is_a_permutation(n: int) -> None:
    assert np.array_equal(np.sort(permuted(np.arange(n), n, seed=7)), np.arange(n))


def test_an_index_goes_to_one_place_whatever_is_asked_with_it() -> None:
    whole = permuted(np.arange(5000), 5000, seed=1)
    some = np.array([4999, 3, 3, 1234])
    assert np.array_equal(permuted(some, 5000, seed=1), whole[some])


def test_permuted_keeps_its_values_over_versions() -> None:
    """A changed value would silently reorder the data of every run that is resumed."""
    assert permuted(np.arange(8), 1000, seed=0).tolist() == [355, 281, 795, 742, 620, 945, 2, 234]
    assert rows_at(3, range(600, 606), 50).tolist() == [10, 24, 45, 40, 2, 14]


def test_permuted_looks_random() -> None:
    order = permuted(np.arange(100_000), 100_000, seed=1)
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.01
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.01
    places = np.array([permuted(np.array([5]), 1000, seed)[0] for seed in range(400)])
    assert 440 < places.mean() < 560  # 500 +- 4 standard errors of 289 / sqrt(400)


@pytest.mark.parametrize(("n_rows", "global_batch"), [(50, 7), (3, 8), (1, 4), (5000, 64)])
def test_each_epoch_reads_every_row_once_and_in_another_order(n_rows: int, global_batch: int) -> None:
    steps = -(-3 * n_rows // global_batch)
    stream = np.concatenate([rows_at(0, Sizes(global_batch).places(step), n_rows) for step in range(steps)])
    epochs = stream[: 3 * n_rows].reshape(3, n_rows)
    assert all(np.array_equal(np.sort(epoch), np.arange(n_rows)) for epoch in epochs)
    if n_rows >= 50:
        assert not np.array_equal(epochs[0], epochs[1])


@pytest.mark.parametrize(("first", "global_batch"), [(20, 7), (999, 8), (1, 4), (3000, 48)])
def test_a_limited_run_reads_the_first_rows_of_an_unlimited_one_and_then_the_same_again(first: int, global_batch: int) -> None:
    steps = -(-4 * first // global_batch)
    whole, limited = (
        np.concatenate([rows_at(0, Sizes(global_batch).places(step), 5000, n) for step in range(steps)]) for n in (None, first)
    )
    epochs = limited[: 4 * first].reshape(4, first)
    assert np.array_equal(epochs[0], whole[:first]) and len(set(whole[:first].tolist())) == first
    assert all(np.array_equal(np.sort(epoch), np.sort(epochs[0])) for epoch in epochs)
    assert first == 1 or len({tuple(epoch) for epoch in epochs}) == 4


def test_a_limit_above_all_rows_is_none() -> None:
    assert np.array_equal(rows_at(0, range(144, 160), 50, 50), rows_at(0, range(144, 160), 50)) and np.array_equal(
        rows_at(0, range(144, 160), 50, 51), rows_at(0, range(144, 160), 50)
    )


def test_rows_in_order_do_not_depend_on_the_batch_size() -> None:
    small = np.concatenate([rows_at(5, Sizes(4).places(step), 999) for step in range(3000)])
    large = np.concatenate([rows_at(5, Sizes(48).places(step), 999) for step in range(250)])
    assert np.array_equal(small, large)


def test_seeds_give_other_orders() -> None:
    assert len({tuple(rows_at(seed, range(8), 1000)) for seed in range(20)}) == 20


@pytest.mark.parametrize(("n_rows", "wanted", "count"), [(10, None, 10), (10, 3, 3), (10, 99, 10), (1, 1, 1), (1_000_003, 1000, 1000)])
def test_spread_gives_different_rows_at_even_distances(n_rows: int, wanted: int | None, count: int) -> None:
    rows = spread(n_rows, wanted)
    assert len(set(rows.tolist())) == count and rows[0] == 0 and rows[-1] < n_rows
    steps = np.diff(rows)
    assert count == 1 or steps.max() - steps.min() <= 1


def test_uniforms_are_even_and_a_function_of_seed_draw_row_and_column() -> None:
    ids = np.arange(2000)
    found = uniforms(3, 5, ids, 50)
    assert found.min() >= 0 and found.max() < 1 and abs(found.mean() - 0.5) < 0.004
    assert np.abs(np.histogram(found, 20, (0, 1))[0] / 5000 - 1).max() < 0.06
    assert abs(np.corrcoef(found[:-1].ravel(), found[1:].ravel())[0, 1]) < 0.015
    assert abs(np.corrcoef(found[:, :-1].ravel(), found[:, 1:].ravel())[0, 1]) < 0.015
    assert np.array_equal(uniforms(3, 5, ids[::-1], 30), found[::-1, :30])
    for other in (uniforms(4, 5, ids, 50), uniforms(3, 6, ids, 50)):
        assert abs(np.corrcoef(found.ravel(), other.ravel())[0, 1]) < 0.015
