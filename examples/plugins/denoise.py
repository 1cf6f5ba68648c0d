"""An objective: denoising, where the part of a row that is replaced by other tokens is drawn too.

Austin et al. 2021, arXiv:2107.03006, section 3.1, uniform; the focal weight is that of Lin et al. 2017, arXiv:1708.02002.

    lm train plugins=examples/plugins/denoise.py objective=denoise model=bert_tiny
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from lm.kinds import IGNORED, LM, Batch, Context, Head, Ids, LossSums, Material, ObjectiveConfig, PackedRows, Rows, loss_of, uniforms


class DenoiseConfig(ObjectiveConfig):
    """Predict all tokens of a row, of which 0 to 100 % are shown as others."""

    models: ClassVar[tuple[Literal["encoder"], ...]] = ("encoder",)
    kind: Literal["denoise"] = "denoise"
    gamma: float = Field(2.0, ge=0)
    """A token counts (1 - p)^gamma, so that those shown as they are, which are easy, count little. 0: all count alike."""

    def rows(self, of: Material) -> Rows:
        return DenoiseRows(of.packing(ahead=0), of.tokenizer, of.seed)


class DenoiseRows(PackedRows):
    """Whether and by which token another is replaced are functions of (seed, draw, row, place)."""

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        packed = self.packing.read(ids)
        s, labels = packed.tokens.shape[1], torch.from_numpy(packed.tokens)
        chance = torch.from_numpy(uniforms(self.seed, draw, ids, 1 + 2 * s))
        replaced, others = chance[:, 1 : 1 + s] < chance[:, :1], (chance[:, 1 + s :] * self.pad).long()
        tokens = packed.padded(self.pad).where(~replaced | (labels < 0), others)
        return Batch(tokens, labels.masked_fill(labels < 0, IGNORED), packed.positions, packed.documents)


def _build(cfg: DenoiseConfig, run: object) -> object:
    def loss(model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        def read(hidden: Tensor, head: Head, ctx: Context) -> LossSums:
            there = batch.labels != IGNORED
            nll = F.cross_entropy(head(hidden[there]).float(), batch.labels[there], reduction="none")
            return LossSums((nll * (1 - (-nll).exp()) ** cfg.gamma).sum(), nll.detach().sum())

        return model(batch, read)

    return loss


loss_of(DenoiseConfig)(_build)
