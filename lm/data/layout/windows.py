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
    """Rows of whole and cut documents. `documents` and `positions` are None where each row is one document at 0..s-1."""

    tokens: Ids  # (b, s), PADDING behind the last
    following: Ids  # (b, s), the next token of the same document, else IGNORED
    documents: Tensor | None  # (b, s) int32, restarting in each row; -1 in the padding
    positions: Tensor | None  # (b, s) int64, restarting in each document; -1 in the padding

    def texts(self, following: bool) -> list[list[Ids]]:
        """The documents of each row as far as they are in it; following: and the token after that, where there is one."""
        return [list(self._texts(row, following)) for row in range(len(self.tokens))]

    def _texts(self, row: int, following: bool) -> Iterator[Ids]:
        inside = self.tokens[row] != PADDING
        starts = np.array([0]) if self.positions is None else np.flatnonzero(self.positions[row].numpy() == 0)
        for start, stop in pairwise([*starts.tolist(), int(inside.sum())]):
            after = self.following[row, stop - 1 : stop * following]
            yield np.concatenate([self.tokens[row, start:stop], after[after != IGNORED]])

    def padded(self, pad: int) -> Tensor:
        """The tokens with `pad` in the padding."""
        return torch.from_numpy(np.where(self.tokens == PADDING, pad, self.tokens))


class Packing(Protocol):
    """How documents are laid into rows."""

    store: TokenStore
    seq_len: int

    def __len__(self) -> int:
        """How many rows."""

    def read(self, ids: Ids) -> Packed:
        """The rows of these ids."""

    def documents(self, ids: Ids) -> Ids:
        """(b, s) which document of the split a token is of; of anything in the padding."""

    def describe(self) -> str:
        """One line on what stays empty; '' where there is nothing to say."""


class Windows:
    """Row i holds tokens [i*s, (i+1)*s) of the stream; the last row is padded.

    ahead: 1 where the last token of the stream is only ever predicted, and has no place of its own; else 0.
    """

    def __init__(self, store: TokenStore, seq_len: int, mask_documents: bool, ahead: int) -> None:
        if store.n_tokens < seq_len + ahead:
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
        """Row and column (1..s) of each document that starts in a row behind its first place, or right behind its end."""
        starts = self.store.starts
        low, high = np.searchsorted(starts, first, "right"), np.searchsorted(starts, first + self.seq_len, "right")
        row = np.repeat(np.arange(len(first)), high - low)
        if not len(row):
            return row, row
        inner = np.concatenate([starts[a:b] for a, b in zip(low, high, strict=True)])
        return row, inner - first[row]


def places(tokens: Ids, row: Ids, column: Ids) -> tuple[Tensor, Tensor]:
    """`documents` and `positions` of rows in which documents begin at these places beside the first."""
    begins = np.zeros(tokens.shape, np.int64)
    begins[row, column] = column
    documents = np.cumsum(begins > 0, axis=1, dtype=np.int32)
    positions = np.arange(tokens.shape[1]) - np.maximum.accumulate(begins, axis=1)
    padding = tokens == PADDING
    documents[padding] = -1
    positions[padding] = -1
    return torch.from_numpy(documents), torch.from_numpy(positions)
