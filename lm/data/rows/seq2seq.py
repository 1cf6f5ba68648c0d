"""Rows of pairs of source and target, mainly for encoder-decoder models."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from lm.data.layout.examples import Example, joined_batch, places_of, side_by_side
from lm.data.order import Ids
from lm.data.records.base import LEARNED
from lm.data.rows.base import Material, Rows
from lm.data.rows.parted import PartedRows
from lm.data.rows.scheduled import ScheduledSamplingConfig
from lm.data.store.shards import Tokens
from lm.data.tokenizer.source import around
from lm.errors import ConfigError
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import EncoderDecoderConfig
from lm.schema import MOST
from lm.units import counted

_ROUND = 16


def shift_right(labels: Tensor, start: int, pad: int) -> Tensor:
    """Returns decoder inputs: `start`, then all labels but the last, with `pad` for IGNORED labels.  labels: (..., s)."""
    shifted = torch.cat([torch.full_like(labels[..., :1], start), labels[..., :-1]], dim=-1)
    return shifted.masked_fill(shifted == IGNORED, pad)


class Seq2SeqConfig(ScheduledSamplingConfig):
    """Predict a target from its source. Sutskever et al. 2014, arXiv:1409.3215; Vaswani et al. 2017, arXiv:1706.03762."""

    models = ("encoder_decoder", "decoder")
    usual_for = ("encoder_decoder",)
    shapes = ("pair",)
    packings = ("none",)
    asked_as = "source"

    kind: Literal["seq2seq"] = "seq2seq"
    target_len: int | None = Field(None, gt=1, le=MOST)
    """Longest target in tokens; longer ones are cut and counted. null: data.seq_len, which bounds the source too; of a decoder-only
    model, in whose rows the two stand one behind the other, half of it."""

    def rows(self, of: Material) -> Rows:
        return Seq2SeqRows(self, of)


class Seq2SeqRows(PartedRows):
    """Row i is pair i: the source to read, the target to predict. Too long texts lose their end, but not their eos.

    A decoder-only model continues the source with the target, both within data.seq_len.
    """

    def __init__(self, cfg: Seq2SeqConfig, of: Material) -> None:
        store, start, seq_len = of.store, of.start, of.data.seq_len
        if not len(store.starts):
            raise ConfigError(f"data: the {store.split} split has 0 pairs. Give more data.")
        super().__init__(store, of.tokenizer, seq_len)
        first = of.model.first_token if isinstance(of.model, EncoderDecoderConfig) else None
        self._start, self._first = start, [] if first is None else [first]
        self._suffixes = around(of.tokenizer)[1], of.tokenizer.suffix
        target_len = min(seq_len, cfg.target_len or (seq_len if start is not None else seq_len // 2))
        self._limits = seq_len if start is not None else seq_len + 1 - target_len, target_len - len(self._first)
        if self._first:
            self.n_labels += store.n_documents
            self.bytes_per_label = store.n_bytes / self.n_labels
        lengths = np.diff(store.parts[:, 0], append=store.n_tokens)
        assert len(lengths) == 2 * store.n_documents and (store.parts[1::2, 1] == LEARNED).all()
        self._lengths = lengths[0::2], lengths[1::2]

    def __len__(self) -> int:
        return self._store.n_documents

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """The batch is as wide as its longest row; padding is on the right, with position -1."""
        pairs = [(self._part(2 * i), np.concatenate([self._first, self._part(2 * i + 1)]).astype(np.int64)) for i in ids.tolist()]
        if self._start is not None:
            return seq2seq_batch([[pair] for pair in pairs], self._start, self.pad)
        return one_per_row([Example.of(*pair) for pair in pairs], self.pad)

    def widths(self, ids: Ids) -> Sequence[Ids]:
        sources, targets = (np.minimum(lengths[ids], limit) for lengths, limit in zip(self._lengths, self._limits, strict=True))
        return [sources + targets] if self._start is None else [sources, targets]

    def describe(self) -> str:
        cut = [int((lengths > limit).sum()) for lengths, limit in zip(self._lengths, self._limits, strict=True)]
        limits = f"over {self._limits[0]} or {self._limits[1]} tokens (data.seq_len, objective.target_len)"
        parts = f"{counted(cut[0], 'source')} and {counted(cut[1], 'target')} of {len(self):,}"
        return f"{self._store.split}: {parts} cut, for being {limits}" if any(cut) else ""

    def _part(self, part: int) -> Tokens:
        """Returns the tokens of source i, part 2 i, or target i, part 2 i + 1."""
        parts, store, limit, suffix = self._store.parts, self._store, self._limits[part % 2], self._suffixes[part % 2]
        begin = int(parts[part, 0])
        end = int(parts[part + 1, 0]) if part + 1 < len(parts) else store.n_tokens
        if end - begin <= limit:
            return store.read(begin, end).astype(np.int64)
        return np.concatenate([store.read(begin, begin + limit - len(suffix)).astype(np.int64), suffix])


def seq2seq_batch(rows: list[list[tuple[Tokens, Tokens]]], start: int, pad: int) -> Batch:
    """Returns a batch of rows of (source, target) pairs, which do not attend to each other; decoder inputs are targets shifted right."""
    sources, targets = [[source for source, _ in row] for row in rows], [[target for _, target in row] for row in rows]
    source_width, width = (rounded(max(sum(map(len, row)) for row in side)) for side in (sources, targets))
    source_positions, source_documents = places_of(sources, source_width)
    positions, documents = places_of(targets, width)
    labels = side_by_side(targets, width, IGNORED)
    tokens = shift_right(labels, start, pad).masked_fill(positions == 0, start)
    packed = any(len(row) > 1 for row in rows)
    return Batch(
        tokens,
        labels,
        positions,
        documents if packed else None,
        source_tokens=side_by_side(sources, source_width, pad),
        source_positions=source_positions,
        source_documents=source_documents if packed else None,
    )


def one_per_row(examples: Sequence[Example], pad: int) -> Batch:
    """Returns a batch with one row per example, as wide as the longest."""
    return joined_batch([[one] for one in examples], rounded(max(len(one.tokens) - 1 for one in examples)), pad)


def rounded(width: int) -> int:
    """Returns the width rounded up, so that compiled models meet fewer different widths."""
    return -(-width // _ROUND) * _ROUND
