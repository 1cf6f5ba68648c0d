"""What rows of records of several parts share, some of which are learned."""

from math import sqrt

import numpy as np

from lm.data.layout.examples import Example
from lm.data.records.base import LEARNED, OTHER
from lm.data.rows.base import Rows
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.units import counted

_MOST_DROPPED = 0.05


class PartedRows(Rows):
    """Base of rows that hold records of several parts, some of which are learned."""

    def __init__(self, store: TokenStore, tokenizer: Tokenizer, seq_len: int) -> None:
        self._store, self.pad, self._seq_len = store, tokenizer.pad, seq_len
        sizes = np.diff(store.parts[:, 0], append=store.n_tokens)
        self.n_labels = max(1, int(sizes[store.parts[:, 1] % OTHER == LEARNED].sum()))
        self.bytes_per_label = store.n_bytes / self.n_labels

    def _example(self, begin: int, end: int) -> Example:
        """Returns the example of tokens begin..end-1 of the store."""
        parts = self._store.parts
        low, high = np.searchsorted(parts[:, 0], [begin, end])
        learned = np.repeat(parts[low:high, 1] % OTHER == LEARNED, np.diff(parts[low:high, 0], append=end))
        return Example(self._store.read(begin, end).astype(np.int64), learned)

    def _require_most(self, n_kept: int, what: str, fault: str, remedy: str, n: int | None = None) -> None:
        """n: how many there are. None: one of each record."""
        n = self._store.n_documents if n is None else n
        most = most_dropped(n)
        if n - n_kept > most or not n_kept:
            raise ConfigError(
                f"data.seq_len={self._seq_len}: {n - n_kept:,} of {n:,} {what} of the {self._store.split} split {fault} a row, and at most"
                f" {most:,} may be dropped. Raise data.seq_len, or {remedy}."
            )

    def _too_long(self, what: str) -> str:
        """Returns how many records have no row, for `describe` of rows that have one record each.  what: a record is called so."""
        n = self._store.n_documents
        return f"{self._store.split}: dropped as too long: {n - len(self):,} of {counted(n, what)}" if len(self) < n else ""


def most_dropped(n: int) -> int:
    """Returns how many of n records may have no row: a twentieth, and what so many may be more by chance (two standard deviations), but no
    more than a tenth."""
    share = _MOST_DROPPED * n
    return int(min(share + 2 * sqrt(share), 2 * share))
