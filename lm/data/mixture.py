"""Rows of several sources by weight, in an order that is a pure function of (seed, step), as that of one source is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.data.order import Ids, derived, in_epochs, permuted
from lm.errors import ConfigError
from lm.nn.batch import Batch

_BLOCK = 1 << 12  # places in which each source has its exact share
_FILL = {"labels": -100, "positions": -1, "documents": -1, "source_positions": -1, "source_documents": -1}


@dataclass(frozen=True)
class Share:
    """What a source may contribute.  n_rows: in an epoch.  limit: rows in all."""

    n_rows: int
    limit: int | None


@dataclass(frozen=True)
class _Segment:
    """Places from `start` on share alike: of each block source i has quotas[i], after `used[i]` before the segment."""

    start: int
    quotas: NDArray[np.int64]
    used: NDArray[np.int64]


class Mixture:
    """Which row of which source is read at each place of a run; place = step * global_batch + row of the step.

    weights: by the first step from which they hold (0 first), of rows. In blocks of 4,096 places each source has its share to within
    one; it walks through its own rows in epochs that are permutations. A source at its limit leaves its part to the others.
    """

    def __init__(self, seed: int, shares: Sequence[Share], weights: Mapping[int, Sequence[float]], global_batch: int) -> None:
        self._seed, self._shares = seed, shares
        self._weights = {step * global_batch: np.array(row, np.float64) for step, row in sorted(weights.items())}
        self.end: int | None = None  # the place where every source is at its limit
        self._segments: list[_Segment] = []
        self._kept: tuple[tuple[int, int], tuple[Ids, Ids]] | None = None
        self._plan()

    def read(self, start: int, stop: int) -> tuple[Ids, Ids]:
        """(source, row of the source) of the places start..stop-1. ConfigError where every source is at its limit before."""
        if self.end is not None and stop > self.end:
            raise ConfigError(
                f"data.sources: after {self.end:,} rows every source has reached its max_epochs, and row {stop:,} is asked for."
                " Raise max_epochs, or train for fewer steps."
            )
        found = []
        for number, segment in enumerate(self._segments):
            last = self._segments[number + 1].start if number + 1 < len(self._segments) else stop
            low, high = max(start, segment.start), min(stop, last)
            if low < high:
                found.append(self._within(number, segment, low - segment.start, high - segment.start))
        source, row = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return source, row

    def used(self, place: int) -> Ids:
        """Rows that each source has given before this place."""
        number = max(n for n, segment in enumerate(self._segments) if segment.start <= place)
        segment = self._segments[number]
        return segment.used + self._counts(number, segment, place - segment.start)

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
                segment = _Segment(place, _quotas(weights), used)
                self._segments.append(segment)
                place = self._first_at_limit(segment, limits, stop)
                if place is None or (stop is not None and place >= stop):
                    place = stop
                if place is not None:
                    used = used + self._counts(len(self._segments) - 1, segment, place - segment.start)

    def _first_at_limit(self, segment: _Segment, limits: NDArray[np.int64], stop: int | None) -> int | None:
        """The place right behind the one at which the first source reaches its limit; None where none does."""
        live = (segment.quotas > 0) & (limits < np.iinfo(np.int64).max)
        if not live.any():
            return None
        left = limits - segment.used
        blocks = int(((left[live] - 1) // segment.quotas[live]).min())
        number = len(self._segments) - 1
        done = blocks * segment.quotas
        for source, count in zip(*self._order(number, segment, blocks), strict=True):
            done[source] += 1
            if live[source] and count + 1 >= limits[source]:
                return int(segment.start + done.sum())
        raise AssertionError("a source reaches its limit within the block")

    def _within(self, number: int, segment: _Segment, low: int, high: int) -> tuple[Ids, Ids]:
        """Source and row of the places low..high-1 of a segment."""
        first = low // _BLOCK
        blocks = [self._block(number, segment, block) for block in range(first, (high - 1) // _BLOCK + 1)]
        source, row = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        span = slice(low - first * _BLOCK, high - first * _BLOCK)
        return source[span], row[span]

    def _block(self, number: int, segment: _Segment, block: int) -> tuple[Ids, Ids]:
        """Source and row of a whole block; the last one is kept, since a step is a small part of it."""
        if self._kept is None or self._kept[0] != (number, block):
            source, count = self._order(number, segment, block)
            self._kept = (number, block), (source, self._rows(source, count))
        return self._kept[1]

    def _order(self, number: int, segment: _Segment, block: int) -> tuple[Ids, Ids]:
        """Source of each place of a block, and how often it was read before."""
        source = np.repeat(np.arange(len(segment.quotas)), segment.quotas)
        order = permuted(np.arange(_BLOCK), _BLOCK, derived(derived(self._seed, -2 - number), block))
        source = source[order]
        count = np.empty(_BLOCK, np.int64)
        for which, quota in enumerate(segment.quotas):
            count[source == which] = segment.used[which] + block * quota + np.arange(quota)
        return source, count

    def _counts(self, number: int, segment: _Segment, places: int) -> Ids:
        whole, rest = divmod(places, _BLOCK)
        source, _ = self._order(number, segment, whole)
        return whole * segment.quotas + np.bincount(source[:rest], minlength=len(segment.quotas))

    def _rows(self, source: Ids, count: Ids) -> Ids:
        rows = np.empty_like(count)
        for which in np.unique(source):
            mine = source == which
            rows[mine] = in_epochs(count[mine], self._shares[which].n_rows, derived(self._seed, int(which)))
        return rows


def _quotas(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Places of a block by weight: the largest remainders get what rounding down leaves, and whoever has a weight gets one at least."""
    exact = weights / weights.sum() * _BLOCK
    quotas = np.where(weights > 0, np.maximum(np.floor(exact), 1), 0).astype(np.int64)
    order = np.argsort(quotas - exact, kind="stable")
    quotas[order[: max(0, _BLOCK - int(quotas.sum()))]] += 1
    quotas[np.argmax(quotas)] -= int(quotas.sum()) - _BLOCK
    return quotas


def merged(parts: Sequence[Batch], places: Sequence[Ids], pad: int) -> Batch:
    """One batch whose rows at places[i] are those of parts[i], as wide as the widest."""
    if len(parts) == 1:
        return parts[0]
    found: dict[str, Tensor | None] = {}
    for name in _TENSORS:
        given = [_field(part, name) for part in parts]
        found[name] = None if all(field is None for field in given) else _joined(name, parts, given, places, pad)
    tokens = found.pop("tokens")
    assert tokens is not None
    return Batch(tokens, **found)  # type: ignore[arg-type]


_TENSORS = ("tokens", "labels", "positions", "documents", "source_tokens", "source_positions", "source_documents", "prefix")


def _field(part: Batch, name: str) -> Tensor | None:
    found: Tensor | None = vars(part)[name]
    return found


def _joined(name: str, parts: Sequence[Batch], given: Sequence[Tensor | None], places: Sequence[Ids], pad: int) -> Tensor:
    """The field of all rows; a part without it has one document at 0, 1, 2 ..., and no prefix."""
    whole = [field if field is not None else _default(name, part) for field, part in zip(given, parts, strict=True)]
    width = max(field.shape[1] for field in whole)
    fill = False if name == "prefix" else _FILL.get(name, pad)
    out = torch.full((sum(map(len, places)), width), fill, dtype=whole[0].dtype)
    for field, at in zip(whole, places, strict=True):
        out[torch.from_numpy(at), : field.shape[1]] = field
    return out


def _default(name: str, part: Batch) -> Tensor:
    tokens = part.source_tokens if name.startswith("source") else part.tokens
    assert tokens is not None
    if name.endswith("positions"):
        return torch.arange(tokens.shape[1]).expand(tokens.shape)
    return torch.zeros(tokens.shape, dtype=torch.bool if name == "prefix" else torch.int32)
