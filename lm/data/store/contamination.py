"""How much of the validation split is also in training: whole documents, and runs of 13 tokens (Brown et al. 2020, appendix C)."""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.store.shards import TokenStore
from lm.errors import ConfigError

_N = 13
_SLICE = 1 << 18  # tokens hashed at once
_RELEASE = 1 << 12  # documents between two releases of mapped memory
_MOST_RUNS = 1 << 22
_BASE = np.uint64(0x9E3779B97F4A7C15)


class Contamination(NamedTuple):
    """documents: training documents that are also in validation; copies: validation documents that are also in training.

    runs: number of different runs of n tokens in validation, or in a sample of it; shared: number of these that are also in training.
    """

    documents: int
    copies: int
    val_documents: int
    runs: int
    shared: int
    n: int = _N

    @property
    def copied_frac(self) -> float:
        """The part of the validation documents that are also in training."""
        return self.copies / max(1, self.val_documents)

    @property
    def shared_frac(self) -> float:
        """The part of the validation runs that are also in training."""
        return self.shared / max(1, self.runs)

    def require(self, most: float) -> None:
        """Raises ConfigError where more than this part of the validation documents are also in training."""
        if self.copied_frac > most:
            raise ConfigError(
                f"data.max_contamination={most:g}: {self.copies:,} of {self.val_documents:,} validation documents are in training too, and"
                " a validation on those says little. Hold out other documents, or raise data.max_contamination."
            )


def contamination(train: TokenStore, val: TokenStore) -> Contamination:
    """Returns the contamination, by one pass over the runs of each split. For a validation split of over 4 M tokens a uniform sample of
    runs, chosen by hash, stands for all."""
    every = np.uint64(max(1, val.n_tokens // _MOST_RUNS))
    hashes = [_sampled(_inner_runs(val, start, tokens), every) for start, tokens in _slices(val)]
    wanted = np.unique(np.concatenate(hashes)) if hashes else np.array([], np.uint64)
    seen = np.zeros(len(wanted), np.bool_)
    sieve = _Sieve(wanted)
    for start, tokens in _slices(train):
        found = np.sort(sieve.possible(_sampled(_inner_runs(train, start, tokens), every)))  # in order, a search stays in the cache
        at = np.searchsorted(wanted, found)
        hit = at[(at < len(wanted)) & (wanted[np.minimum(at, len(wanted) - 1)] == found)] if len(wanted) else at[:0]
        seen[hit] = True
    documents, copies = _equal_documents(train, val)
    return Contamination(documents, copies, val.n_documents, len(wanted), int(seen.sum()))


class _Sieve:
    """A filter that passes all wanted hashes and few others: looking up every hash in the sorted wanted ones would take many times as
    long."""

    def __init__(self, wanted: NDArray[np.uint64]) -> None:
        bits = min(27, max(10, len(wanted).bit_length() + 4))
        self._mask = np.uint64((1 << bits) - 1)
        self._held = np.zeros(1 << bits, np.bool_)
        self._held[wanted & self._mask] = True

    def possible(self, found: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns those of the hashes that may be wanted."""
        return found[self._held[found & self._mask]]


def _equal_documents(train: TokenStore, val: TokenStore) -> tuple[int, int]:
    """Returns (training documents also in validation, validation documents also in training). Documents are equal if their lengths and
    64-bit hashes are."""
    lengths = [np.diff(store.starts, append=store.n_tokens) for store in (train, val)]
    alike = np.flatnonzero(np.isin(lengths[0], np.unique(lengths[1])))
    found = _keys(train, alike, lengths[0])
    held, times = np.unique(_keys(val, np.arange(val.n_documents), lengths[1]), return_counts=True)
    return int(np.isin(found, held).sum()), int(times[np.isin(held, found)].sum())


def _keys(store: TokenStore, documents: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns a hash of each of these documents."""
    found = np.empty(len(documents), np.uint64)
    spans = zip(np.asarray(store.starts)[documents].tolist(), lengths[documents].tolist(), strict=True)
    for number, (start, length) in enumerate(spans):
        data = np.ascontiguousarray(store.read(start, start + length)).tobytes()
        found[number] = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        if number % _RELEASE == 0:
            store.release()
    return found


def _slices(store: TokenStore) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """Yields (start, tokens) of overlapping slices of the stream, so that each run of n tokens is whole in one slice."""
    for start in range(0, max(0, store.n_tokens - _N + 1), _SLICE):
        yield start, store.read(start, min(store.n_tokens, start + _SLICE + _N - 1)).astype(np.uint64)
        store.release()


def _inner_runs(store: TokenStore, start: int, tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns a hash of each run that lies within one document."""
    found = _runs(tokens)
    low, high = np.searchsorted(store.starts, [start + 1, start + len(tokens)])
    inner = np.asarray(store.starts[low:high]) - start
    whole = np.ones(len(tokens) + _N, np.bool_)
    for before in range(1, _N):  # runs that cross into the next document; negative indices hit the padding
        whole[inner - before] = False
    return found[whole[: len(found)]]


def _sampled(found: NDArray[np.uint64], every: np.uint64) -> NDArray[np.uint64]:
    return found if every == 1 else found[(found >> np.uint64(24)) % every == 0]


def _runs(tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns a hash of each run of n tokens: a polynomial modulo 2^64, then mixed."""
    single = tokens + np.uint64(1)
    found, n = single, 1
    for bit in f"{_N:b}"[1:]:  # doubles the runs' length n, and adds one where the bit is set
        found, n = found[:-n] * np.uint64(pow(int(_BASE), n, 1 << 64)) + found[n:], 2 * n
        if bit == "1":
            found, n = found[:-1] * _BASE + single[n:], n + 1
    return found ^ (found >> np.uint64(29))
