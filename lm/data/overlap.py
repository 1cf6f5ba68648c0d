"""How much of the validation split is in the training split: whole documents, and runs of 13 tokens (Brown et al. 2020, appendix C)."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.shards import TokenStore

_N = 13
_SLICE = 1 << 22  # tokens that are hashed at once
_MOST_RUNS = 1 << 22
_BASE = np.uint64(0x9E3779B97F4A7C15)


class Overlap(NamedTuple):
    """documents: of training, that are in validation too; copies: of validation, that are in training too.

    runs: different runs of n tokens of validation, or of a sample; shared: those that training has too.
    """

    documents: int
    copies: int
    val_documents: int
    runs: int
    shared: int
    n: int = _N

    @property
    def copied_frac(self) -> float:
        """Part of the validation documents that are in training too."""
        return self.copies / max(1, self.val_documents)

    @property
    def shared_frac(self) -> float:
        """Part of the runs of the validation split that are in training too."""
        return self.shared / max(1, self.runs)


def overlap(train: TokenStore, val: TokenStore) -> Overlap:
    """One pass over each split. Of a validation split of over 4 M tokens an even sample of the runs, by their hashes, stands for all."""
    every = np.uint64(max(1, val.n_tokens // _MOST_RUNS))
    hashes = [_sampled(_inner_runs(val, start, tokens), every) for start, tokens in _slices(val)]
    wanted = np.unique(np.concatenate(hashes)) if hashes else np.array([], np.uint64)
    seen = np.zeros(len(wanted), np.bool_)
    sieve = _Sieve(wanted)
    for start, tokens in _slices(train):
        found = sieve.possible(_sampled(_inner_runs(train, start, tokens), every))
        at = np.searchsorted(wanted, found)
        hit = at[(at < len(wanted)) & (wanted[np.minimum(at, len(wanted) - 1)] == found)] if len(wanted) else at[:0]
        seen[hit] = True
    documents, copies = _equal_documents(train, val)
    return Overlap(documents, copies, val.n_documents, len(wanted), int(seen.sum()))


class _Sieve:
    """Lets all wanted hashes through, and few others: to look up each in the sorted ones takes many times as long."""

    def __init__(self, wanted: NDArray[np.uint64]) -> None:
        bits = min(27, max(10, len(wanted).bit_length() + 4))
        self._mask = np.uint64((1 << bits) - 1)
        self._held = np.zeros(1 << bits, np.bool_)
        self._held[wanted & self._mask] = True

    def possible(self, found: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Those that may be wanted."""
        return found[self._held[found & self._mask]]


def _equal_documents(train: TokenStore, val: TokenStore) -> tuple[int, int]:
    """How many of each split are in the other: equal in length and in every token, as far as 128 bits tell."""
    lengths = set(np.diff(val.starts, append=val.n_tokens).tolist())
    held = Counter(_key(val, a, b) for a, b in pairwise([*val.starts.tolist(), val.n_tokens]))
    bounds = np.append(train.starts, train.n_tokens)
    alike = np.flatnonzero(np.isin(np.diff(bounds), list(lengths)))
    found = Counter(key for i in alike if (key := _key(train, int(bounds[i]), int(bounds[i + 1]))) in held)
    return found.total(), sum(held[key] for key in found)


def _key(store: TokenStore, start: int, stop: int) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(store.read(start, stop)).tobytes(), digest_size=16).digest()


def _slices(store: TokenStore) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """The stream in pieces that overlap, so that each run is whole in one."""
    for start in range(0, max(0, store.n_tokens - _N + 1), _SLICE):
        yield start, store.read(start, min(store.n_tokens, start + _SLICE + _N - 1)).astype(np.uint64)


def _inner_runs(store: TokenStore, start: int, tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of each run that lies in one document."""
    found = _runs(tokens)
    low, high = np.searchsorted(store.starts, [start + 1, start + len(tokens)])
    inner = np.asarray(store.starts[low:high]) - start
    whole = np.ones(len(tokens) + _N, np.bool_)
    for before in range(1, _N):  # the runs that begin in one document and end in the next; a negative place is past the end
        whole[inner - before] = False
    return found[whole[: len(found)]]


def _sampled(found: NDArray[np.uint64], every: np.uint64) -> NDArray[np.uint64]:
    return found if every == 1 else found[(found >> np.uint64(24)) % every == 0]


def _runs(tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of each run of n tokens, modulo 2^64 (polynomial, then mixed)."""
    n = len(tokens) - _N + 1
    found = np.zeros(max(0, n), np.uint64)
    for offset in range(_N):
        found = found * _BASE + tokens[offset : offset + n] + np.uint64(1)
    return found ^ (found >> np.uint64(29))
