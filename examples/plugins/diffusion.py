"""An objective: masked diffusion, where the part of a row that is hidden is drawn too.

Sahoo et al. 2024, arXiv:2406.07524; Nie et al. 2025, arXiv:2502.09992. A token weighs 1 / part that is hidden, for their 1 / chance.

    lm train plugins=examples/plugins/diffusion.py objective=diffusion model=bert_tiny
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from lm.kinds import IGNORED, LM, Batch, Context, Head, Ids, LossSums, Material, ObjectiveConfig, PackedRows, Rows, loss_of, uniforms


class DiffusionConfig(ObjectiveConfig):
    """Predict the hidden tokens of a row, of which 0 to 100 % are hidden."""

    models: ClassVar[tuple[Literal["encoder"], ...]] = ("encoder",)
    kind: Literal["diffusion"] = "diffusion"
    least: float = Field(0.05, gt=0, lt=1)
    """The smallest part of a row that is hidden, which bounds the weight of a token."""

    def rows(self, of: Material) -> Rows:
        return DiffusionRows(self, of)


class DiffusionRows(PackedRows):
    """The padding token, which no text holds, stands for a hidden one."""

    def __init__(self, cfg: DiffusionConfig, of: Material) -> None:
        super().__init__(of.packing(ahead=0), of.tokenizer)
        self.least, self.seed = cfg.least, of.seed

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        packed = self.packing.read(ids)
        chance = torch.from_numpy(uniforms(self.seed, draw, ids, 1 + packed.tokens.shape[1]))
        tokens, labels = packed.padded(self.pad), torch.from_numpy(packed.tokens)
        hidden = (chance[:, 1:] < self.least + (1 - self.least) * chance[:, :1]) & (labels >= 0)
        return Batch(tokens.masked_fill(hidden, self.pad), labels.masked_fill(~hidden, IGNORED), packed.positions, packed.documents)


def loss(model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
    """Each row's loss per hidden token, times its length."""
    row, place = torch.nonzero(batch.labels != IGNORED, as_tuple=True)

    def read(hidden: Tensor, head: Head, ctx: Context) -> LossSums:
        nll = F.cross_entropy(head(hidden[row, place]).float(), batch.labels[row, place], reduction="none")
        weight = batch.labels.shape[1] / row.bincount(minlength=len(batch.labels))
        return LossSums((nll * weight[row]).sum(), nll.detach().sum())

    return model(batch, read)


loss_of(DiffusionConfig)(lambda cfg, run: loss)
