"""Rows of a source and a target each, for encoder-decoder models above all."""

from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from lm.data.layout.examples import Example, joined_batch
from lm.data.order import Ids
from lm.data.records.base import LEARNED
from lm.data.rows.base import Material, ModelKind, Rows, ScheduledSamplingConfig, widest
from lm.data.store.shards import Tokens, TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import IGNORED, Batch

_ROUND = 16


def shift_right(labels: Tensor, start: int, pad: int) -> Tensor:
    """Decoder inputs: `start`, then all labels but the last, with `pad` for IGNORED ones.  labels: (..., s)."""
    shifted = torch.cat([torch.full_like(labels[..., :1], start), labels[..., :-1]], dim=-1)
    return shifted.masked_fill(shifted == IGNORED, pad)


class Seq2SeqConfig(ScheduledSamplingConfig):
    """Predict a target from its source. Sutskever et al. 2014, arXiv:1409.3215; Vaswani et al. 2017, arXiv:1706.03762."""

    models: ClassVar[tuple[ModelKind, ...]] = ("encoder_decoder", "decoder")
    usual_for: ClassVar[tuple[ModelKind, ...]] = ("encoder_decoder",)
    shapes: ClassVar[tuple[str, ...]] = ("pair",)
    packings: ClassVar[tuple[str, ...]] = ("none",)

    kind: Literal["seq2seq"] = "seq2seq"
    target_len: int | None = Field(None, gt=1)
    """Longest target in tokens; longer ones are cut and counted. null: data.seq_len, which bounds the source too; of a decoder-only
    model, in whose rows the two stand one behind the other, half of it."""

    def rows(self, of: Material) -> Rows:
        return Seq2SeqRows(self, of.store, of.tokenizer, of.data.seq_len, of.start)


class Seq2SeqRows:
    """Row i is pair i: the source to read, the target to predict. Too long ones lose their end, not their eos.

    start: the decoder's first token; None: a decoder-only model, which goes on from the source with the target, both in data.seq_len.
    """

    def __init__(self, cfg: Seq2SeqConfig, store: TokenStore, tokenizer: Tokenizer, seq_len: int, start: int | None) -> None:
        if not len(store.starts):
            raise ConfigError(f"data: the {store.split} split has 0 pairs. Give more data.")
        self._store, self._start, self._pad, self._suffix = store, start, tokenizer.pad, tokenizer.suffix
        target_len = min(seq_len, cfg.target_len or (seq_len if start is not None else seq_len // 2))
        self._limits = seq_len if start is not None else seq_len + 1 - target_len, target_len
        begins = store.parts[:, 0]
        lengths = np.diff(begins, append=store.n_tokens)
        assert len(begins) == 2 * store.n_documents and (store.parts[1::2, 1] == LEARNED).all()
        self._lengths = lengths[0::2], lengths[1::2]
        self.bytes_per_label = store.n_bytes / int(self._lengths[1].sum())

    def __len__(self) -> int:
        return self._store.n_documents

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """As wide as the longest of these rows; padding stands on the right, with position -1."""
        rows = [[self._pair(int(i))] for i in ids]
        if self._start is not None:
            return seq2seq_batch(rows, self._start, self._pad)
        width = max(len(source) + len(target) - 1 for [(source, target)] in rows)
        return joined_batch([[Example.of(*pair) for pair in row] for row in rows], rounded(width), self._pad)

    def widest(self, n: int) -> Ids:
        """By source and target, or where these stand in one row by their sum."""
        sources, targets = (np.minimum(lengths, limit) for lengths, limit in zip(self._lengths, self._limits, strict=True))
        return widest(n, sources + targets) if self._start is None else widest(n, sources, targets)

    def describe(self) -> str:
        """How many are too long."""
        cut = [int((lengths > limit).sum()) for lengths, limit in zip(self._lengths, self._limits, strict=True)]
        limits = f"over {self._limits[0]} or {self._limits[1]} tokens (data.seq_len, objective.target_len)"
        return f"{self._store.split}: {cut[0]:,} sources and {cut[1]:,} targets of {len(self):,} are {limits} and cut" if any(cut) else ""

    def _pair(self, number: int) -> tuple[Tokens, Tokens]:
        return self._part(2 * number, self._limits[0]), self._part(2 * number + 1, self._limits[1])

    def _part(self, part: int, limit: int) -> Tokens:
        parts, store = self._store.parts, self._store
        begin = int(parts[part, 0])
        end = int(parts[part + 1, 0]) if part + 1 < len(parts) else store.n_tokens
        if end - begin <= limit:
            return store.read(begin, end).astype(np.int64)
        return np.concatenate([store.read(begin, begin + limit - len(self._suffix)).astype(np.int64), self._suffix])


def seq2seq_batch(rows: list[list[tuple[Tokens, Tokens]]], start: int, pad: int) -> Batch:
    """Each row holds (source, target) pairs, which do not see each other; decoder tokens are each target's labels shifted right."""
    source_tokens, source_positions, source_documents = _laid([[source for source, _ in row] for row in rows], pad)
    labels, positions, documents = _laid([[target for _, target in row] for row in rows], IGNORED)
    tokens = shift_right(labels, start, pad).masked_fill(positions == 0, start)
    packed = any(len(row) > 1 for row in rows)
    return Batch(
        tokens,
        labels,
        positions,
        documents if packed else None,
        source_tokens=source_tokens,
        source_positions=source_positions,
        source_documents=source_documents if packed else None,
    )


def rounded(width: int) -> int:
    """A width that compiled models meet more often."""
    return -(-width // _ROUND) * _ROUND


def _laid(rows: list[list[Tokens]], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """(b, m) tokens, positions and documents of texts side by side; position and document are -1 in the padding."""
    shape = len(rows), rounded(max(sum(map(len, row)) for row in rows))
    tokens, positions, documents = np.full(shape, pad, np.int64), np.full(shape, -1, np.int64), np.full(shape, -1, np.int32)
    for row, texts in enumerate(rows):
        at = 0
        for number, text in enumerate(texts):
            span = slice(at, at + len(text))
            tokens[row, span], positions[row, span], documents[row, span] = text, np.arange(len(text)), number
            at += len(text)
    return torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(documents)
