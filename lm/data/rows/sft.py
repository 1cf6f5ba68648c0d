"""Rows of chats for SFT: the assistant's messages are learned, the rest is only read; of texts beside them everything."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lm.data.layout.best_fit import best_fit
from lm.data.layout.examples import Example, joined_batch
from lm.data.layout.windows import Windows
from lm.data.order import Ids
from lm.data.records.base import LEARNED
from lm.data.rows.base import LikelihoodConfig, Material, Rows
from lm.data.rows.causal import CausalRows
from lm.data.rows.parted import PartedRows
from lm.data.rows.seq2seq import rounded
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.batch import Batch
from lm.units import counted


class SFTConfig(LikelihoodConfig):
    """Predict what the assistant says in a chat."""

    shapes = ("chat", "recall")
    usual_for = ("chat", "recall")
    packings = ("fit", "none")
    takes_texts = True
    needs_masked_documents = True
    answers = True

    kind: Literal["sft"] = "sft"
    prompt_loss: bool = False
    """Predict what the others say too."""

    def rows(self, of: Material) -> Rows:
        packed = of.packed == "fit"
        if not len(of.store.parts):
            return TextRows(self, of, packed)
        return SFTRows(self, of.store, of.tokenizer, of.data.seq_len, packed)


class TextRows(CausalRows):
    """Plain texts of a mixture with chats, all of which is learned: cut out of their stream, as for objective=causal."""

    def __init__(self, cfg: SFTConfig, of: Material, packed: bool) -> None:
        super().__init__(of.store, of.tokenizer, of.data.seq_len, True, Windows(of.store, of.data.seq_len, True, ahead=1, short=of.short))
        self._packed, self._prompt_loss = packed, cfg.prompt_loss

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        batch = super().batch(ids, draw)
        batch.answers = batch.labels if self._prompt_loss else None
        return batch

    def widths(self, ids: Ids) -> Sequence[Ids]:
        return () if self._packed else [np.full(len(ids), self.packing.seq_len + 1)]


class SFTRows(PartedRows):
    """Whole chats side by side (best fit), or one per row. A chat longer than a row loses its end; it is left out where that leaves nothing
    to learn."""

    def __init__(self, cfg: SFTConfig, store: TokenStore, tokenizer: Tokenizer, seq_len: int, packed: bool) -> None:
        super().__init__(store, tokenizer, seq_len)
        self._packed, self._prompt_loss = packed, cfg.prompt_loss
        self._lengths = np.diff(store.starts, append=store.n_tokens)
        self._kept = np.flatnonzero(self._learnable())
        self._require_most(len(self._kept), "chats", "have nothing to learn within", "shorten the prompts")
        places = np.minimum(self._lengths[self._kept] - 1, seq_len)
        one_by_one: tuple[Ids, Ids] = np.arange(len(places)), np.arange(len(places) + 1)
        order, self._bounds = best_fit(places, seq_len) if packed else one_by_one
        self._chats = self._kept[order]
        self._fill = places.sum() / (len(self) * seq_len)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """Packed rows are all data.seq_len wide; others are as wide as the longest of the batch."""
        rows = [[self._chat(int(chat)) for chat in self._chats[self._bounds[i] : self._bounds[i + 1]]] for i in ids]
        width = self._seq_len if self._packed else min(self._seq_len, rounded(max(len(row[0].tokens) - 1 for row in rows)))
        batch = joined_batch(rows, width, self.pad)
        if self._prompt_loss:
            batch.answers, everything = batch.labels, [[Example(chat.tokens, np.ones_like(chat.learned)) for chat in row] for row in rows]
            batch.labels = joined_batch(everything, width, self.pad).labels
        return batch

    def widths(self, ids: Ids) -> Sequence[Ids]:
        return () if self._packed else [np.minimum(self._lengths[self._chats[ids]], self._seq_len + 1)]

    def describe(self) -> str:
        cut = int((self._lengths[self._kept] - 1 > self._seq_len).sum())
        dropped = len(self._lengths) - len(self._kept)
        rows = f"{counted(len(self), 'row')} of {self._seq_len} tokens, {self._fill:.1%} full"
        longer = f", their ends lost (the longest has {int(self._lengths.max()):,} tokens; raise data.seq_len)" if cut else ""
        left_out = f"{cut:,} cut{longer}, {dropped:,} dropped with nothing to learn in the row"
        return f"{self._store.split}: {counted(len(self._kept), 'chat')} in {rows}; {left_out}"

    def _learnable(self) -> NDArray[np.bool_]:
        """Returns (chats,) bool: whether a learned token comes after the chat's first token and within the row."""
        parts, starts = self._store.parts, self._store.starts
        chat = np.searchsorted(starts, parts[:, 0], "right") - 1
        first = np.maximum(parts[:, 0] - starts[chat], 1)
        last = np.append(parts[1:, 0], self._store.n_tokens) - starts[chat] - 1
        inside = (parts[:, 1] == LEARNED) & (first <= np.minimum(last, self._seq_len))
        return np.bincount(chat, weights=inside, minlength=len(starts)) > 0

    def _chat(self, chat: int) -> Example:
        begin = int(self._store.starts[chat])
        end = begin + min(int(self._lengths[chat]), self._seq_len + 1)
        return self._example(begin, end)
