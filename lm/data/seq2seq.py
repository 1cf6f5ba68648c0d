"""Rows for encoder-decoder models: a source and a target each."""

import numpy as np
import torch
from torch import Tensor

from lm.data.objective import Seq2SeqConfig
from lm.data.order import Ids
from lm.data.pieces import LEARNED
from lm.data.shards import Tokens, TokenStore
from lm.data.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import IGNORED, Batch

_ROUND = 16  # widths of batches are multiples of this, so that compiled models meet few shapes


def shift_right(labels: Tensor, start: int, pad: int) -> Tensor:
    """Decoder inputs: `start`, then all labels but the last, with `pad` for IGNORED ones.  labels: (..., s)."""
    shifted = torch.cat([torch.full_like(labels[..., :1], start), labels[..., :-1]], dim=-1)
    return shifted.masked_fill(shifted == IGNORED, pad)


class Seq2SeqRows:
    """Row i is pair i: the source to read, the target to predict behind the start token. Too long ones lose their end, not their eos."""

    def __init__(self, cfg: Seq2SeqConfig, store: TokenStore, tokenizer: Tokenizer, seq_len: int, start: int) -> None:
        if not len(store.starts):
            raise ConfigError(f"data: the {store.split} split has 0 pairs. Give more data.")
        self._store, self._start, self._pad, self._suffix = store, start, tokenizer.pad, tokenizer.suffix
        self._limits = seq_len, min(seq_len, cfg.target_len or seq_len)
        begins = store.parts[:, 0]
        lengths = np.diff(begins, append=store.n_tokens)
        assert len(begins) == 2 * store.n_documents and (store.parts[1::2, 1] == LEARNED).all()
        self._lengths = lengths[0::2], lengths[1::2]
        self.bytes_per_label = store.n_bytes / int(self._lengths[1].sum())

    def __len__(self) -> int:
        return self._store.n_documents

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """As wide as the longest of these rows; padding stands on the right, with position -1."""
        sources = [self._part(2 * int(i), self._limits[0]) for i in ids]
        targets = [self._part(2 * int(i) + 1, self._limits[1]) for i in ids]
        return seq2seq_batch(sources, targets, self._start, self._pad)

    def describe(self) -> str:
        """How many are too long."""
        cut = [int((lengths > limit).sum()) for lengths, limit in zip(self._lengths, self._limits, strict=True)]
        limits = f"over data.seq_len={self._limits[0]} or objective.target_len={self._limits[1]}"
        return f"{self._store.split}: {cut[0]:,} sources and {cut[1]:,} targets of {len(self):,} are {limits} and cut" if any(cut) else ""

    def _part(self, part: int, limit: int) -> Tokens:
        parts, store = self._store.parts, self._store
        begin = int(parts[part, 0])
        end = int(parts[part + 1, 0]) if part + 1 < len(parts) else store.n_tokens
        if end - begin <= limit:
            return store.read(begin, end)
        return np.concatenate([store.read(begin, begin + limit - len(self._suffix)), np.array(self._suffix, np.int64)])


def seq2seq_batch(sources: list[Tokens], targets: list[Tokens], start: int, pad: int) -> Batch:
    """Sources and labels as rows of one width each; tokens are the labels shifted right."""
    source_tokens, source_positions = _padded(sources, pad)
    labels, positions = _padded(targets, IGNORED)
    tokens = shift_right(labels, start, pad)
    return Batch(tokens, labels, positions, source_tokens=source_tokens, source_positions=source_positions)


def _padded(rows: list[Tokens], pad: int) -> tuple[Tensor, Tensor]:
    """(b, m) tokens and positions."""
    lengths = np.array([len(row) for row in rows])
    width = -(-int(lengths.max()) // _ROUND) * _ROUND
    tokens = np.full((len(rows), width), pad, np.int64)
    positions = np.broadcast_to(np.arange(width), tokens.shape)
    for to, row in zip(tokens, rows, strict=True):
        to[: len(row)] = row
    return torch.from_numpy(tokens), torch.from_numpy(np.where(positions < lengths[:, None], positions, -1))
