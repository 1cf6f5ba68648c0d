"""Rows of preference pairs: a prompt with the better answer, and the same with the worse one."""

from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from lm.data.layout.examples import Example, joined_batch
from lm.data.order import Ids
from lm.data.records.base import OTHER
from lm.data.rows.base import Material, ModelKind, ObjectiveConfig, PartedRows, Rows, widest
from lm.data.rows.seq2seq import rounded
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.batch import Batch


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


class PreferenceRows(PartedRows):
    """Row i is pair i, which gives two rows of a batch, the better answer first. In a validation it is the better answer alone.

    A pair with an answer that does not end within data.seq_len is dropped and counted.
    """

    def __init__(self, store: TokenStore, tokenizer: Tokenizer, seq_len: int) -> None:
        super().__init__(store, tokenizer, seq_len)
        self._both = store.split == "train"
        parts = store.parts
        other = np.flatnonzero((parts[:, 1] >= OTHER) & np.append(True, parts[:-1, 1] < OTHER))
        self._middle = parts[other, 0]  # where the second answer's side begins
        self._ends = np.append(store.starts[1:], store.n_tokens)
        self._longest = np.maximum(self._middle - store.starts, self._ends - self._middle)
        self._kept = np.flatnonzero(self._longest - 1 <= seq_len)
        self._require_most(len(self._kept), "pairs", "do not fit into", "shorten the texts")

    def __len__(self) -> int:
        return len(self._kept)

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        return self.pairs(ids) if self._both else self._answers(ids, 1)

    def pairs(self, ids: Ids) -> Batch:
        """Both answers of each, in a validation too; the step counts pairs, not labels."""
        batch = self._answers(ids, 2)
        batch.step_tokens = len(ids)
        return batch

    def widest(self, n: int) -> Ids:
        return widest(n, self._longest[self._kept])

    def describe(self) -> str:
        dropped = self._store.n_documents - len(self)
        return f"{self._store.split}: {dropped:,} of {self._store.n_documents:,} pairs are too long and dropped" if dropped else ""

    def _answers(self, ids: Ids, n: int) -> Batch:
        """A row for each of the first n answers."""
        rows = [[example] for pair in self._kept[ids] for example in self._examples(int(pair))[:n]]
        return joined_batch(rows, rounded(max(len(row[0].tokens) - 1 for row in rows)), self.pad)

    def _examples(self, pair: int) -> list[Example]:
        bounds = [int(self._store.starts[pair]), int(self._middle[pair]), int(self._ends[pair])]
        return [self._example(*side) for side in pairwise(bounds)]
