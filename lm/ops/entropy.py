"""The cross-entropy of a chunk of logits and its gradient: plain torch, of which a GPU's compiler makes one kernel over the rows."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lm.ops.compiling import expect_kinds, why_not_compiled
from lm.ops.precision import wide_dtype


def entropy_(logits: Tensor, labels: Tensor, answers: Tensor | None, label_smoothing: float, z_loss: float) -> Tensor:
    """Writes the gradient of the loss over the logits, and returns five sums in float32: of the loss; of the labels' nats; of the answers'
    nats, of those that are the likeliest token, and how many answers there are. A negative label, or answer, is none.

    logits: (n, v); labels, answers: (n,). The loss is cross-entropy with smoothing (Szegedy et al. 2015, arXiv:1512.00567) and, with
    weight z_loss, the square of log Z (Chowdhery et al. 2022, arXiv:2204.02311). All is computed in float32, or in what is wider.
    """
    wide = logits.to(wide_dtype(logits))
    log_z = wide.logsumexp(-1)
    wanted, counted = _one_of(labels, wide), (labels >= 0).to(wide.dtype)
    nll = ((log_z - _picked(wide, wanted)) * counted).sum()
    total, share = nll, counted
    if label_smoothing:
        total = (1 - label_smoothing) * nll + label_smoothing * ((log_z - wide.mean(-1)) * counted).sum()
    if z_loss:
        total = total + z_loss * (log_z.square() * counted).sum()
        share = counted * (1 + 2 * z_loss * log_z)
    sums = [total, nll, *_answered(wide, log_z, answers)]
    target = label_smoothing / logits.shape[1] + (1 - label_smoothing) * wanted.to(wide.dtype)
    logits.copy_((wide - log_z.unsqueeze(-1)).exp() * share.unsqueeze(-1) - target * counted.unsqueeze(-1))
    return torch.stack(sums).float()


def _answered(wide: Tensor, log_z: Tensor, answers: Tensor | None) -> list[Tensor]:
    if answers is None:
        return [log_z.new_zeros(())] * 3
    counted = (answers >= 0).to(wide.dtype)
    nats = (log_z - _picked(wide, _one_of(answers, wide))) * counted
    return [nats.sum(), ((wide.argmax(-1) == answers) * counted).sum(), counted.sum()]


def _one_of(labels: Tensor, logits: Tensor) -> Tensor:
    """Returns which logit is the label's, (n, v); a negative label has none."""
    return torch.arange(logits.shape[1], device=logits.device) == labels.unsqueeze(-1)


def _picked(logits: Tensor, wanted: Tensor) -> Tensor:
    """Returns the labels' logits, (n,), as sums over rows: a gather would have to come between log Z and the gradient that is written over
    the logits, which makes two kernels of one."""
    return torch.where(wanted, logits, 0).sum(-1)


def entropy_here(device: torch.device) -> Callable[..., Tensor] | None:
    """Returns `entropy_` compiled, for CUDA devices that compiled kernels serve; None for others, where its passes would be many."""
    return _compiled() if device.type == "cuda" and why_not_compiled(device) is None else None


@cache
def _compiled() -> Callable[..., Tensor]:
    """The function, compiled at its first call; a second number of rows is compiled for any number."""
    expect_kinds()
    return torch.compile(entropy_)
