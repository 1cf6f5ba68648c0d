"""The order of rows: which one stands at a place is a pure function of (seed, place), so that resuming needs one integer."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Seeds = int | NDArray[np.uint64]
_BLOCK = 1 << 12
_ROUNDS = 4  # of pseudo-random functions make a strong permutation (Luby & Rackoff 1988)


def permuted(index: Ids, n: int, seed: Seeds) -> Ids:
    """Returns the image of each index under a random permutation of 0..n-1.  seed: of the permutation, or one for each index.

    A balanced Feistel network over the next power of four, applied again while a result is outside 0..n-1 (cycle walking, Black & Rogaway
    2002, section 4). It needs no table and no library generator, so it takes no memory and stays the same across versions.
    """
    half = np.uint64(max(1, (n - 1).bit_length() + 1 >> 1))
    seeds = np.broadcast_to(np.asarray(seed, np.uint64), index.shape)
    found = _feistel(index.astype(np.uint64), half, seeds)
    while len(outside := np.flatnonzero(found >= n)):
        found[outside] = _feistel(found[outside], half, seeds[outside])
    return found.astype(np.int64)


def in_epochs(place: Ids, n: int, seed: int) -> Ids:
    """Returns which of n rows is read at each place of an endless order, in which every n places are another permutation."""
    epochs, own = np.unique(place // n, return_inverse=True)
    return permuted(place % n, n, np.array([derived(seed, epoch) for epoch in epochs.tolist()], np.uint64)[own])


def rows_at(seed: int, places: range, n_rows: int, first: int | None = None) -> Ids:
    """Returns the ids of the rows at consecutive places of a run, such as a step's. Every epoch is another permutation, and places may span
    several epochs.

    first: only the first so many rows of the first epoch's order are read; later epochs permute these. None: all rows.
    """
    start, stop = places.start, places.stop
    size = min(_BLOCK, 16 * n_rows)
    block = start // size
    rows = np.concatenate([_block(seed, n_rows, first, number * size, size) for number in range(block, (stop - 1) // size + 1)])
    return rows[start - block * size : stop - block * size]


def spread(n_rows: int, wanted: int | None) -> Ids:
    """Returns `wanted` evenly spaced row ids, always the same ones; all row ids where there are no more than that."""
    count = n_rows if wanted is None else min(wanted, n_rows)
    return np.arange(count, dtype=np.int64) * n_rows // count


def widest(n: int, *widths: Ids) -> Ids:
    """Returns ids of n rows, repeated where there are fewer: the widest by each measure in turn.  widths: per measure, of all rows."""
    by_turns = np.stack([np.argsort(-width, kind="stable")[:n] for width in widths], axis=1).ravel()
    return np.resize(np.array(list(dict.fromkeys(by_turns.tolist())), np.int64), n)


def uniforms(seed: int, draw: int, ids: Ids, n: int) -> NDArray[np.float64]:
    """Returns (b, n) numbers in [0, 1), each a function only of the seed, the draw (a step), the row id and the column."""
    rows = _mixed(ids.astype(np.uint64) ^ np.uint64(derived(derived(seed, draw), 0)))
    columns = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (_mixed(rows[:, None] + columns) >> np.uint64(11)) * 2.0**-53


@lru_cache(maxsize=4)
def _block(seed: int, n_rows: int, first: int | None, start: int, size: int) -> Ids:
    """Returns the row ids at places start..start+size-1 of a run. Made in blocks: permuting 8 rows takes as long as permuting hundreds."""
    place = np.arange(start, start + size, dtype=np.int64)
    if first is not None and first < n_rows:
        place = np.where(place < first, place, in_epochs(place, first, derived(seed, -1)))
    return in_epochs(place, n_rows, seed)


def _feistel(value: NDArray[np.uint64], half: np.uint64, seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_mixed(right ^ _derived(seeds, turn)) & mask)
    return (left << half) | right


def derived(seed: int, number: int) -> int:
    """Returns a 64-bit seed mixed from a seed and a number; neighbouring numbers give unrelated seeds."""
    return int(_derived(np.array([seed % 2**64], np.uint64), number)[0])


def _derived(seeds: NDArray[np.uint64], number: int) -> NDArray[np.uint64]:
    return _mixed(seeds * np.uint64(0x9E3779B97F4A7C15) + np.uint64((number + 1) * 0xD1342543DE82EF95 % 2**64))


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele et al. 2014), modulo 2^64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
