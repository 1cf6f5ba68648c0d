"""Scheduled sampling: some of the decoder's inputs are sampled from the model itself, so that it learns to go on from its own output.

Bengio et al. 2015, arXiv:1506.03099; in two passes, since a Transformer sees all inputs at once: Mihaylova & Martins 2019,
arXiv:1906.07651. Only the second pass has a gradient, and the labels stay the data's.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lm.data.order import uniforms
from lm.data.rows.scheduled import ScheduledSamplingConfig
from lm.losses.cross_entropy import LossSums
from lm.nn.batch import IGNORED, Batch
from lm.nn.context import Context
from lm.nn.head import Head
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.objectives.base import Objective, loss_of
from lm.training.objectives.likelihood import Likelihood, likelihood


class ScheduledSampling:
    """Likelihood with a part of the inputs replaced by the model's own samples; the part grows linearly with the steps."""

    def __init__(self, plain: Likelihood, cfg: ScheduledSamplingConfig, max_steps: int, seed: int) -> None:
        self._plain, self._cfg, self._max_steps, self._seed = plain, cfg, max_steps, seed

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        chance = chances(batch, self._seed, step, first_row)
        frac = self._cfg.scheduled_sampling * step / self._max_steps
        return self._plain(model, with_sampled_inputs(model, batch, frac, chance, self._cfg.chunk), step, first_row)


@loss_of(ScheduledSamplingConfig)
def _scheduled(cfg: ScheduledSamplingConfig, run: TrainConfig) -> Objective:
    plain = likelihood(cfg, run)
    return ScheduledSampling(plain, cfg, run.trainer.max_steps, run.seeds.dropout) if cfg.scheduled_sampling else plain


def chances(batch: Batch, seed: int, step: int, first_row: int) -> Tensor:
    """Returns (b, s, 2) numbers in [0, 1). Those of a row are the same however the step is split over micro-batches and ranks."""
    b, s = batch.tokens.shape
    drawn = uniforms(seed, step, np.arange(first_row, first_row + b), 2 * s).reshape(b, s, 2)
    return torch.from_numpy(drawn).float().to(batch.tokens.device)


def with_sampled_inputs(model: LM, batch: Batch, frac: float, chance: Tensor, chunk: int) -> Batch:
    """Returns the batch with about `frac` of its inputs replaced by tokens sampled from the model's prediction one position earlier.
    Only inputs that are labels of the position before can be replaced.

    chance: (b, s, 2) numbers in [0, 1): [..., 0] decides whether an input is replaced, [..., 1] which token is sampled at a position.
    """
    assert batch.labels is not None
    with torch.no_grad():
        drawn: Tensor = model(batch, read=lambda hidden, head, ctx: _drawn(hidden, head, ctx, chance[..., 1], chunk))
    predicted = torch.zeros_like(batch.labels, dtype=torch.bool)
    predicted[:, 1:] = batch.labels[:, :-1] != IGNORED
    if batch.documents is not None:  # a document's first token is no position's label
        predicted[:, 1:] &= batch.documents[:, 1:] == batch.documents[:, :-1]
    chosen = predicted & (chance[..., 0] < frac)
    return replace(batch, tokens=torch.where(chosen, drawn.roll(1, dims=1), batch.tokens))


def _drawn(hidden: Tensor, head: Head, ctx: Context, chance: Tensor, chunk: int) -> Tensor:
    """Returns (b, s): a token sampled from the model's distribution at each position. Logits exist for `chunk` positions at once."""
    pieces = zip(hidden.flatten(0, 1).split(chunk), chance.flatten().split(chunk), strict=True)  # (b, s, d) -> (b*s, d)
    return torch.cat([_token(head(piece).float(), numbers) for piece, numbers in pieces]).view(hidden.shape[:2])


def _token(logits: Tensor, chance: Tensor) -> Tensor:
    """Returns (n,) tokens sampled by inverse CDF.  logits: (n, v); chance: (n,) numbers in [0, 1)."""
    below = logits.softmax(-1).cumsum(-1)
    return (below <= chance[:, None] * below[:, -1:]).sum(-1).clamp_max(logits.shape[-1] - 1)
