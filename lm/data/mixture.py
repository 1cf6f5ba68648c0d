"""Mixes rows of several sources by weight, in an order that is a pure function of (seed, step), as with a single source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.data.order import Ids, derived, in_epochs, permuted
from lm.errors import ConfigError
from lm.nn.batch import IGNORED, Batch

_BLOCK = 1 << 12  # places in which each source has its exact share
_FILL = {
    "tokens": None, "labels": IGNORED, "positions": -1, "documents": -1,
    "source_tokens": None, "source_positions": -1, "source_documents": -1, "prefix": False, "answers": IGNORED,
    "segments": 0, "targets": 0.0, "shares": 0.0,
}  # fmt: skip
"""What stands in the padding of each field of a batch; None: the tokenizer's pad."""


@dataclass(frozen=True)
class Share:
    """What a source may contribute.  n_rows: rows of an epoch.  limit: rows over the whole run."""

    n_rows: int
    limit: int | None


@dataclass(frozen=True)
class _Segment:
    """A stretch of places with constant shares, from `start` on: source i gets quotas[i] places of each block, and has given `used[i]` rows
    before the segment."""

    number: int
    start: int
    quotas: NDArray[np.int64]
    used: NDArray[np.int64]


class Mixture:
    """Decides which row of which source is read at each place of a run.

    weights: row weights of the sources, by the first place at which they hold (0 first). In blocks of 4,096 places each source has its
    share to within one place. A source's rows are read in epochs, each a permutation. What a source at its limit leaves goes to the others.
    """

    def __init__(self, seed: int, shares: Sequence[Share], weights: Mapping[int, Sequence[float]]) -> None:
        self._seed, self._shares = seed, shares
        self._weights = {place: np.array(row, np.float64) for place, row in sorted(weights.items())}
        self.end: int | None = None  # the place where every source is at its limit
        self._segments: list[_Segment] = []
        self._kept: tuple[tuple[int, int], tuple[Ids, Ids]] | None = None
        self._plan()

    def read(self, start: int, stop: int) -> tuple[Ids, Ids]:
        """Returns (source, row of the source) at places start..stop-1. Raises as `require` does."""
        self.require(stop)
        found = []
        ends = [*(segment.start for segment in self._segments[1:]), stop]
        for segment, end in zip(self._segments, ends, strict=True):
            low, high = max(start, segment.start), min(stop, end)
            if low < high:
                found.append(self._within(segment, low - segment.start, high - segment.start))
        source, row = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return source, row

    def require(self, n: int) -> None:
        """Raises ConfigError where all sources reach their limits before the first n places are read."""
        if self.end is not None and n > self.end:
            raise ConfigError(
                f"data.sources: after {self.end:,} rows every source has reached its max_epochs, and row {n:,} is asked for."
                " Raise max_epochs, or train for fewer steps."
            )

    def used(self, place: int) -> Ids:
        """Returns the number of rows that each source has given before this place."""
        segment = next(segment for segment in reversed(self._segments) if segment.start <= place)
        return segment.used + self._counts(segment, place - segment.start)

    def _plan(self) -> None:
        used, starts = np.zeros(len(self._shares), np.int64), [*self._weights, None]
        limits = np.array([np.iinfo(np.int64).max if share.limit is None else share.limit for share in self._shares])
        for start, stop in pairwise(starts):
            assert start is not None
            place: int | None = start
            while place is not None and (stop is None or place < stop):
                weights = np.where(used < limits, self._weights[start], 0.0)
                if not weights.sum():
                    self.end = place
                    return
                segment = _Segment(len(self._segments), place, _quotas(weights), used)
                self._segments.append(segment)
                full = self._first_at_limit(segment, limits)
                place = min((end for end in (full, stop) if end is not None), default=None)
                if place is not None:
                    used = used + self._counts(segment, place - segment.start)

    def _first_at_limit(self, segment: _Segment, limits: NDArray[np.int64]) -> int | None:
        """Returns the place after the one at which a source first reaches its limit; None where none does."""
        live = (segment.quotas > 0) & (limits < np.iinfo(np.int64).max)
        if not live.any():
            return None
        left = limits - segment.used
        blocks = int(((left[live] - 1) // segment.quotas[live]).min())
        done = blocks * segment.quotas
        for source, count in zip(*self._order(segment, blocks), strict=True):
            done[source] += 1
            if live[source] and count + 1 >= limits[source]:
                return int(segment.start + done.sum())
        raise AssertionError("a source reaches its limit within the block")

    def _within(self, segment: _Segment, low: int, high: int) -> tuple[Ids, Ids]:
        """Returns source and row at places low..high-1, counted from the segment's start."""
        first = low // _BLOCK
        blocks = [self._block(segment, block) for block in range(first, (high - 1) // _BLOCK + 1)]
        source, row = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        span = slice(low - first * _BLOCK, high - first * _BLOCK)
        return source[span], row[span]

    def _block(self, segment: _Segment, block: int) -> tuple[Ids, Ids]:
        """Returns source and row of all places of a block. Keeps the last block, since a step is a small part of one."""
        if self._kept is None or self._kept[0] != (segment.number, block):
            source, count = self._order(segment, block)
            self._kept = (segment.number, block), (source, self._rows(source, count))
        return self._kept[1]

    def _order(self, segment: _Segment, block: int) -> tuple[Ids, Ids]:
        """Returns the source at each place of a block, and how many rows that source has given before the place."""
        source = np.repeat(np.arange(len(segment.quotas)), segment.quotas)
        order = permuted(np.arange(_BLOCK), _BLOCK, derived(derived(self._seed, -2 - segment.number), block))
        source = source[order]
        count = np.empty(_BLOCK, np.int64)
        for which, quota in enumerate(segment.quotas):
            count[source == which] = segment.used[which] + block * quota + np.arange(quota)
        return source, count

    def _counts(self, segment: _Segment, places: int) -> Ids:
        whole, rest = divmod(places, _BLOCK)
        source, _ = self._order(segment, whole)
        return whole * segment.quotas + np.bincount(source[:rest], minlength=len(segment.quotas))

    def _rows(self, source: Ids, count: Ids) -> Ids:
        rows = np.empty_like(count)
        for which in np.unique(source):
            mine = source == which
            rows[mine] = in_epochs(count[mine], self._shares[which].n_rows, derived(self._seed, int(which)))
        return rows


def _quotas(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the number of places per block for each source, by weight: places lost by rounding down go to the largest remainders, and
    every source with a weight above 0 gets at least one."""
    exact = weights / weights.sum() * _BLOCK
    quotas = np.where(weights > 0, np.maximum(np.floor(exact), 1), 0).astype(np.int64)
    order = np.argsort(quotas - exact, kind="stable")
    quotas[order[: max(0, _BLOCK - int(quotas.sum()))]] += 1
    quotas[np.argmax(quotas)] -= int(quotas.sum()) - _BLOCK
    return quotas


def merged(parts: Sequence[Batch], places: Sequence[Ids], pad: int) -> Batch:
    """Returns one batch, as wide as the widest part: the rows of parts[i] stand at places[i], equally many of a part at each of its places.

    A field that only some parts have is filled in for the others: each row is one document at positions 0, 1, 2 ..., without a prefix, and
    each label counts 1.
    """
    if len(parts) == 1:
        return parts[0]
    found: dict[str, Any] = {}
    each = [len(part.tokens) // len(at) for part, at in zip(parts, places, strict=True)]
    begins = np.zeros(sum(map(len, places)) + 1, np.int64)  # the first row of each place
    for n, at in zip(each, places, strict=True):
        begins[at + 1] = n
    begins = begins.cumsum()
    places = [(begins[at][:, None] + np.arange(n)).ravel() for n, at in zip(each, places, strict=True)]
    for name, fill in _FILL.items():
        given = [vars(part)[name] for part in parts]
        if all(field is None for field in given):
            continue
        whole: list[Tensor] = [_default(name, part) if field is None else field for field, part in zip(given, parts, strict=True)]
        shape = sum(map(len, places)), max(field.shape[1] for field in whole), *whole[0].shape[2:]
        found[name] = torch.full(shape, pad if fill is None else fill, dtype=whole[0].dtype)
        for field, at in zip(whole, places, strict=True):
            found[name][torch.from_numpy(at), : field.shape[1]] = field
    beside = [each for part in parts for each in part.beside]
    if all(part.lengths is not None for part in parts):
        found["lengths"] = (found["positions"] >= 0).sum(-1).tolist()
    return Batch(**found, step_tokens=sum(part.step_tokens for part in parts), beside=beside)


def _default(name: str, part: Batch) -> Tensor:
    tokens = part.source_tokens if name.startswith("source") else part.tokens
    assert tokens is not None
    if name.endswith("positions"):
        return torch.arange(tokens.shape[1]).expand(tokens.shape)
    if name == "shares":
        return torch.ones(tokens.shape)
    return torch.zeros(tokens.shape, dtype={"prefix": torch.bool, "segments": torch.int64}.get(name, torch.int32))
