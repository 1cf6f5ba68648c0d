"""Rows of preference pairs: a prompt with the better answer, and the same with the worse one."""

from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from lm.data.layout.examples import Example, joined_batch
from lm.data.order import Ids
from lm.data.records.base import LEARNED, OTHER
from lm.data.rows.base import Material, ModelKind, ObjectiveConfig, Rows, widest
from lm.data.rows.seq2seq import rounded
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import Batch

_MOST_DROPPED = 0.05


class DPOConfig(ObjectiveConfig):
    """Raise the better of two answers above the worse one, compared with the model at the start (DPO). It needs init_from."""

    models: ClassVar[tuple[ModelKind, ...]] = ("decoder",)
    shapes: ClassVar[tuple[str, ...]] = ("preference",)
    packings: ClassVar[tuple[str, ...]] = ("none",)
    needs_masked_documents: ClassVar[bool] = True
    needs_parent: ClassVar[bool] = True

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0)
    """How much a departure from the model at the start costs (Rafailov et al. 2023, arXiv:2305.18290, equation 7)."""

    def rows(self, of: Material) -> Rows:
        return PreferenceRows(of.store, of.tokenizer, of.data.seq_len)


class PreferenceRows:
    """Row i is pair i, which gives two rows of a batch, the better answer first. In a validation it is the better answer alone.

    A pair with an answer that does not end within data.seq_len is dropped and counted.
    """

    def __init__(self, store: TokenStore, tokenizer: Tokenizer, seq_len: int) -> None:
        self._store, self._pad, self._both = store, tokenizer.pad, store.split == "train"
        parts = store.parts
        other = np.flatnonzero((parts[:, 1] >= OTHER) & np.append(True, parts[:-1, 1] < OTHER))
        self._middle = parts[other, 0]  # where the second answer's side begins
        ends = np.append(store.starts[1:], store.n_tokens)
        self._longest = np.maximum(self._middle - store.starts, ends - self._middle)
        self._kept = np.flatnonzero(self._longest - 1 <= seq_len)
        self._ends, n = ends, len(ends)
        if n - len(self._kept) > _MOST_DROPPED * n or not len(self._kept):
            raise ConfigError(
                f"data.seq_len={seq_len}: {n - len(self._kept):,} of {n:,} pairs of the {store.split} split do not fit into a row, and at"
                f" most {_MOST_DROPPED:.0%} may be dropped. Raise data.seq_len, or shorten the texts."
            )
        sizes = np.diff(parts[:, 0], append=store.n_tokens)
        self.bytes_per_label = store.n_bytes / max(1, int(sizes[parts[:, 1] % OTHER == LEARNED].sum()))

    def __len__(self) -> int:
        return len(self._kept)

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """Nothing is random here."""
        return self.pairs(ids) if self._both else self._answers(ids, 1)

    def pairs(self, ids: Ids) -> Batch:
        """Both answers of each, in a validation too; the step counts pairs, not labels."""
        batch = self._answers(ids, 2)
        batch.step_tokens = len(ids)
        return batch

    def widest(self, n: int) -> Ids:
        """By the longer of the two answers, its prompt included."""
        return widest(n, self._longest[self._kept])

    def describe(self) -> str:
        """How many pairs are too long."""
        dropped = self._store.n_documents - len(self)
        return f"{self._store.split}: {dropped:,} of {self._store.n_documents:,} pairs are too long and dropped" if dropped else ""

    def _answers(self, ids: Ids, n: int) -> Batch:
        """A row for each of the first n answers."""
        rows = [[example] for pair in self._kept[ids] for example in self._examples(int(pair))[:n]]
        return joined_batch(rows, rounded(max(len(row[0].tokens) - 1 for row in rows)), self._pad)

    def _examples(self, pair: int) -> list[Example]:
        bounds = [int(self._store.starts[pair]), int(self._middle[pair]), int(self._ends[pair])]
        return [self._example(*side) for side in pairwise(bounds)]

    def _example(self, begin: int, end: int) -> Example:
        parts = self._store.parts
        low, high = np.searchsorted(parts[:, 0], [begin, end])
        learned = np.repeat(parts[low:high, 1] % OTHER == LEARNED, np.diff(parts[low:high, 0], append=end))
        return Example(self._store.read(begin, end).astype(np.int64), learned)
