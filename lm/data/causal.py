"""Rows for next-token prediction: the stream of documents cut every seq_len tokens."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.data.shards import TokenStore
from lm.data.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import IGNORED, Batch

Ids = NDArray[np.int64]


class CausalRows:
    """Row i holds tokens [i*s, (i+1)*s) of the stream, labelled with the token after each.

    A label that begins another document is IGNORED. The last row is padded: pad token, IGNORED label, position and document -1.
    """

    def __init__(self, store: TokenStore, tokenizer: Tokenizer, seq_len: int, mask_documents: bool) -> None:
        if store.n_tokens < seq_len + 1:
            raise ConfigError(
                f"data.seq_len={seq_len}: the {store.split} split has {store.n_tokens} tokens, and one row needs {seq_len + 1}."
                " Lower data.seq_len or give more text."
            )
        self.store = store
        self.seq_len = seq_len
        self._pad = tokenizer.pad
        self._mask_documents = mask_documents

    def __len__(self) -> int:
        return -(-(self.store.n_tokens - 1) // self.seq_len)

    def label_tokens(self, ids: Ids) -> int:
        """Labels of these rows that are not IGNORED, without reading a token."""
        first = ids * self.seq_len
        labels = np.minimum(self.seq_len, self.store.n_tokens - 1 - first)
        low, high = self._starts(first)
        return int(labels.sum() - (high - low).sum())

    def batch(self, ids: Ids, step_tokens: int = 0) -> Batch:
        """`documents` and `positions` restart in each row; None where no row has a start or padding, or mask_documents is off."""
        first = ids * self.seq_len
        stream = self._stream(first)  # (b, s + 1), -1 in the padding
        padded = int(first.max()) + self.seq_len >= self.store.n_tokens
        tokens, labels = stream[:, :-1].copy(), stream[:, 1:].copy()
        row, column = self._inner_starts(first)
        labels[row, column - 1] = IGNORED
        if padded:
            labels[labels < 0] = IGNORED
        inside = column < self.seq_len
        documents = positions = None
        if self._mask_documents and (padded or inside.any()):
            documents, positions = self._documents(tokens, row[inside], column[inside])
        if padded:
            tokens[tokens < 0] = self._pad
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), positions, documents, step_tokens)

    def _stream(self, first: Ids) -> Ids:
        stream = np.empty((len(first), self.seq_len + 1), np.int64)
        for row, start in zip(stream, first.tolist(), strict=True):
            part = self.store.read(start, start + self.seq_len + 1)
            row[: len(part)] = part
            row[len(part) :] = -1
        return stream

    def _starts(self, first: Ids) -> tuple[Ids, Ids]:
        """The range of documents that start in a row behind its first place, or right behind its end."""
        starts = self.store.starts
        return np.searchsorted(starts, first, "right"), np.searchsorted(starts, first + self.seq_len, "right")

    def _inner_starts(self, first: Ids) -> tuple[Ids, Ids]:
        """Row and column (1..s) of each such start."""
        low, high = self._starts(first)
        row = np.repeat(np.arange(len(first)), high - low)
        if not len(row):
            return row, row
        starts = np.concatenate([self.store.starts[a:b] for a, b in zip(low, high, strict=True)])
        return row, starts - first[row]

    def _documents(self, tokens: Ids, row: Ids, column: Ids) -> tuple[Tensor, Tensor]:
        at = np.arange(self.seq_len)
        begins = np.zeros(tokens.shape, np.int64)
        begins[row, column] = column
        documents = np.cumsum(begins > 0, axis=1, dtype=np.int32)
        positions = at - np.maximum.accumulate(begins, axis=1)
        padding = tokens < 0
        documents[padding] = -1
        positions[padding] = -1
        return torch.from_numpy(documents), torch.from_numpy(positions)
