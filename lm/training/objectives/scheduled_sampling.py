"""Scheduled sampling: some of the decoder's inputs are what the model itself would have said, so that it learns to go on from those.

Bengio et al. 2015, arXiv:1506.03099; in two passes, since a Transformer sees all inputs at once: Mihaylova & Martins 2019,
arXiv:1906.07651. The second pass alone has a gradient, and what is predicted stays the data's.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lm.data.order import uniforms
from lm.nn.batch import IGNORED, Batch
from lm.nn.context import Context
from lm.nn.head import Head
from lm.nn.transformer import LM


def chances(batch: Batch, seed: int, step: int, first_row: int) -> Tensor:
    """(b, s, 2) numbers in [0, 1): of each row of a step the same, however the step is split over micro-batches and ranks."""
    b, s = batch.tokens.shape
    drawn = uniforms(seed, step, np.arange(first_row, first_row + b), 2 * s).reshape(b, s, 2)
    return torch.from_numpy(drawn).float().to(batch.tokens.device)


def with_sampled_inputs(model: LM, batch: Batch, frac: float, chance: Tensor, chunk: int) -> Batch:
    """The batch with about `frac` of those inputs that were predicted the place before drawn from the model's prediction there.

    chance: (b, s, 2), for an input whether it is drawn, and at the place before which token.
    """
    assert batch.labels is not None
    with torch.no_grad():
        drawn: Tensor = model(batch, read=lambda hidden, head, ctx: _drawn(hidden, head, ctx, chance[..., 1], chunk))
    predicted = torch.zeros_like(batch.labels, dtype=torch.bool)
    predicted[:, 1:] = batch.labels[:, :-1] != IGNORED
    if batch.documents is not None:  # what a document begins with was predicted nowhere
        predicted[:, 1:] &= batch.documents[:, 1:] == batch.documents[:, :-1]
    chosen = predicted & (chance[..., 0] < frac)
    return replace(batch, tokens=torch.where(chosen, drawn.roll(1, dims=1), batch.tokens))


def _drawn(hidden: Tensor, head: Head, ctx: Context, chance: Tensor, chunk: int) -> Tensor:
    """(b, s) a token at each place, from the model's distribution; logits exist for `chunk` places at once."""
    pieces = zip(hidden.flatten(0, 1).split(chunk), chance.flatten().split(chunk), strict=True)  # (b, s, d) -> (b*s, d)
    return torch.cat([_token(head(piece).float(), numbers) for piece, numbers in pieces]).view(hidden.shape[:2])


def _token(logits: Tensor, chance: Tensor) -> Tensor:
    """(n,) where the cumulated probabilities pass a number in [0, 1).  logits: (n, v)."""
    below = logits.softmax(-1).cumsum(-1)
    return (below <= chance[:, None] * below[:, -1:]).sum(-1).clamp_max(logits.shape[-1] - 1)
