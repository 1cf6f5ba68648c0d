"""Rows cut out of a stream of documents every seq_len tokens (concatenate and split)."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lm.data.order import Ids
from lm.data.store.shards import TokenStore
from lm.errors import ConfigError
from lm.nn.batch import IGNORED

PADDING = -1


@dataclass
class Packed:
    """Rows of whole and cut documents. `documents` and `positions` are None where each row counts as one document at positions 0..s-1."""

    tokens: Ids  # (b, s), PADDING after the last token
    following: Ids  # (b, s), the next token of the same document, else IGNORED
    documents: Tensor | None  # (b, s) int32, restarting in each row; -1 in the padding
    positions: Tensor | None  # (b, s) int64, restarting in each document; -1 in the padding

    def texts(self, following: bool) -> list[list[Ids]]:
        """Returns for each row the parts of documents in it.  following: each part also with its document's next token, if there is one."""
        return [list(self._texts(row, following)) for row in range(len(self.tokens))]

    def _texts(self, row: int, following: bool) -> Iterator[Ids]:
        inside = self.tokens[row] != PADDING
        starts = np.array([0]) if self.positions is None else np.flatnonzero(self.positions[row].numpy() == 0)
        for start, stop in pairwise([*starts.tolist(), int(inside.sum())]):
            after = self.following[row, stop - 1 : stop * following]
            yield np.concatenate([self.tokens[row, start:stop], after[after != IGNORED]])

    def padded(self, pad: int) -> Tensor:
        """Returns the tokens, with `pad` in the padding."""
        return torch.from_numpy(np.where(self.tokens == PADDING, pad, self.tokens))


class Packing(Protocol):
    """How documents are laid into rows."""

    store: TokenStore
    seq_len: int

    def __len__(self) -> int:
        """Number of rows."""

    def read(self, ids: Ids) -> Packed:
        """Returns the rows with these ids."""

    def documents(self, ids: Ids) -> Ids:
        """Returns (b, s): the number of each token's document in the split; any number in the padding."""

    def describe(self) -> str:
        """Returns one line on the places left empty; '' where there is nothing to say."""


class Windows:
    """Row i holds tokens [i*s, (i+1)*s) of the stream; the last row is padded.

    ahead: 1 where the last token of the stream is only a label, never an input, and so takes no place; else 0.  short: the only row may be
    padded too. Else raises ConfigError where the stream does not fill one.
    """

    def __init__(self, store: TokenStore, seq_len: int, mask_documents: bool, ahead: int, short: bool = False) -> None:
        if store.n_tokens < (1 if short else seq_len) + ahead:
            raise ConfigError(
                f"data.seq_len={seq_len}: the {store.split} split has {store.n_tokens} tokens, and one row needs {seq_len + ahead}."
                " Lower data.seq_len or give more text."
            )
        self.store, self.seq_len = store, seq_len
        self._mask_documents, self._ahead = mask_documents, ahead

    def __len__(self) -> int:
        return -(-(self.store.n_tokens - self._ahead) // self.seq_len)

    def read(self, ids: Ids) -> Packed:
        first = ids * self.seq_len
        stream = self._stream(first)  # (b, s + 1)
        missing = int(first.max()) + self.seq_len - self.store.n_tokens
        tokens, following = stream[:, :-1].copy(), stream[:, 1:].copy()
        row, column = self._inner_starts(first)
        following[row, column - 1] = IGNORED
        if missing >= 0:
            following[following == PADDING] = IGNORED
        inside = column < self.seq_len
        documents = positions = None
        if missing > 0 or (self._mask_documents and inside.any()):
            shown = inside if self._mask_documents else np.zeros_like(inside)
            documents, positions = places(tokens, row[shown], column[shown])
        return Packed(tokens, following, documents, positions)

    def documents(self, ids: Ids) -> Ids:
        place = ids[:, None] * self.seq_len + np.arange(self.seq_len)
        return np.searchsorted(self.store.starts, place, "right") - 1

    def describe(self) -> str:
        return ""

    def _stream(self, first: Ids) -> Ids:
        stream = np.empty((len(first), self.seq_len + 1), np.int64)
        for row, start in zip(stream, first.tolist(), strict=True):
            part = self.store.read(start, start + self.seq_len + 1)
            row[: len(part)] = part
            row[len(part) :] = PADDING
        return stream

    def _inner_starts(self, first: Ids) -> tuple[Ids, Ids]:
        """Returns (row, column) of each document start inside a row, columns 1..s; column s is the place right after the row."""
        starts = self.store.starts
        low, high = np.searchsorted(starts, first, "right"), np.searchsorted(starts, first + self.seq_len, "right")
        row = np.repeat(np.arange(len(first)), high - low)
        if not len(row):
            return row, row
        inner = np.concatenate([starts[a:b] for a, b in zip(low, high, strict=True)])
        return row, inner - first[row]


def places(tokens: Ids, row: Ids, column: Ids) -> tuple[Tensor, Tensor]:
    """Returns `documents` and `positions` of rows in which documents begin at column 0 and at these (row, column) places."""
    begins = np.zeros(tokens.shape, np.int64)
    begins[row, column] = column
    documents = np.cumsum(begins > 0, axis=1, dtype=np.int32)
    positions = np.arange(tokens.shape[1]) - np.maximum.accumulate(begins, axis=1)
    padding = tokens == PADDING
    documents[padding] = -1
    positions[padding] = -1
    return torch.from_numpy(documents), torch.from_numpy(positions)
