"""Scheduled sampling: some of the decoder's inputs are what the model itself would have said, so that it learns to go on from those.

Bengio et al. 2015, arXiv:1506.03099; in two passes, since a Transformer sees all inputs at once: Mihaylova & Martins 2019,
arXiv:1906.07651. The second pass alone has a gradient, and what is predicted stays the data's.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lm.nn.batch import IGNORED, Batch
from lm.nn.context import Context
from lm.nn.head import Head
from lm.nn.transformer import LM


def with_own_tokens(model: LM, batch: Batch, frac: float, chunk: int) -> Batch:
    """The batch with about `frac` of those inputs that were predicted the place before drawn from the model's prediction there.

    Draws from torch's default generator, which the module seeds for each micro-batch.
    """
    assert batch.labels is not None
    with torch.no_grad():
        drawn: Tensor = model(batch, loss=lambda hidden, head, ctx: _drawn(hidden, head, ctx, chunk))
    predicted = torch.zeros_like(batch.labels, dtype=torch.bool)
    predicted[:, 1:] = batch.labels[:, :-1] != IGNORED
    chosen = predicted & (torch.rand(predicted.shape, device=predicted.device) < frac)
    return replace(batch, tokens=torch.where(chosen, drawn.roll(1, dims=1), batch.tokens))


def _drawn(hidden: Tensor, head: Head, ctx: Context, chunk: int) -> Tensor:
    """(b, s) a token at each place, from the model's distribution; logits exist for `chunk` places at once."""
    pieces = [head(piece).float().softmax(-1).multinomial(1) for piece in hidden.flatten(0, 1).split(chunk)]  # (b, s, d) -> (b*s, 1)
    return torch.cat(pieces).view(hidden.shape[:2])
