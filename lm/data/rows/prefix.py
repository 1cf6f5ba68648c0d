"""Rows for prefix language modelling: the beginning of each document has bidirectional attention, the rest is predicted."""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lm.data.layout.windows import Packed
from lm.data.order import Ids, uniforms
from lm.data.rows.base import LikelihoodConfig, Material, Rows
from lm.data.rows.packed import PackedRows
from lm.nn.batch import IGNORED, Batch


class PrefixConfig(LikelihoodConfig):
    """Predict the rest of each document from a beginning of random length that is seen from all sides. Raffel et al. 2019, section 3.2."""

    packings = ("split", "fit")
    asked_as = "prefix"

    kind: Literal["prefix"] = "prefix"

    def rows(self, of: Material) -> Rows:
        return PrefixRows(of.packing(ahead=1), of.tokenizer, of.seed)


class PrefixRows(PackedRows):
    """A prefix's length is drawn uniformly from 1 to all but one of the document's tokens in the row. Raffel et al. 2019, section 3.2."""

    def documents(self, ids: Ids) -> Ids:
        return self.packing.documents(ids)

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        packed = self.packing.read(ids)
        starts, lengths = _documents(packed)
        chance = np.take_along_axis(uniforms(self.seed, draw, ids, packed.tokens.shape[1]), starts, axis=1)
        prefix_lens = 1 + (chance * (lengths - 1)).astype(np.int64)
        prefix = (np.arange(packed.tokens.shape[1]) - starts < prefix_lens) & (lengths > 0)
        leaked = prefix & np.roll(prefix, -1, axis=1) & (np.roll(starts, -1, axis=1) == starts)  # the next token is visible
        labels = np.where(leaked, IGNORED, packed.following)
        tokens = packed.padded(self.pad)
        return Batch(tokens, torch.from_numpy(labels), packed.positions, packed.documents, prefix=torch.from_numpy(prefix))


def _documents(packed: Packed) -> tuple[Ids, Ids]:
    """Returns two (b, s): the column where each place's document begins in the row, and its length there; length 0 in the padding."""
    b, s = packed.tokens.shape
    if packed.positions is None:
        return np.zeros((b, s), np.int64), np.full((b, s), s)
    positions: NDArray[np.int64] = packed.positions.numpy()
    starts = np.where(positions < 0, np.arange(s), np.arange(s) - positions)
    places = starts + s * np.arange(b)[:, None]
    lengths = np.bincount(places[positions >= 0], minlength=b * s)
    return starts, np.where(positions < 0, 0, lengths[places])
