"""The likelihood of each label, for losses that compare answers: logits exist only chunk by chunk, in the backward again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from lm.losses.tokens import labelled_first
from lm.nn.batch import IGNORED
from lm.nn.context import Context
from lm.nn.head import CHUNK, WIDE, WIDE_CPU, Head
from lm.ops.precision import uncached_casts


class _Likelihoods(torch.autograd.Function):
    """log p of each label in float32 or wider; the gradient is written over the logits.  logits: (n, v); labels: (n,), none negative."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        log_z = torch.cat([_wide(some).logsumexp(-1) for some in logits.split(_rows(logits))])
        ctx.save_for_backward(logits, labels, log_z)
        return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1).to(log_z.dtype) - log_z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, labels, log_z = ctx.saved_tensors
        size = _rows(logits)
        for some, label, z, g in zip(logits.split(size), labels.split(size), log_z.split(size), gradient.split(size), strict=True):
            p = _wide(some).sub(z.unsqueeze(-1)).exp_().mul_(-g.unsqueeze(-1))
            some.copy_(p.scatter_add_(-1, label.unsqueeze(-1), g.unsqueeze(-1)))
        return logits, None


def _rows(logits: Tensor) -> int:
    """How many rows of the logits are computed in float32 at a time."""
    return max(1, (WIDE_CPU if logits.is_cpu else WIDE) // logits.shape[1])


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def label_likelihoods(labels: Tensor, chunk: int = CHUNK) -> Callable[[Tensor, Head, Context], Tensor]:
    """A reader: (n,) the log-likelihood of each label that is not IGNORED, row by row. Of more labels than `chunk` the logits are
    computed again in the backward, so that never more than a chunk of them exists."""
    n = int((labels != IGNORED).sum())

    def read(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        def likelihoods(places: Tensor, wanted: Tensor) -> Tensor:
            """Without the head's hooks, by which ZeRO-3 would gather it at each call, of which ranks have different numbers."""
            with uncached_casts(places.device):  # so that the gradients of chunks are summed in float32
                found: Tensor = _Likelihoods.apply(head.forward(places), wanted)
            return found

        first = labelled_first(labels.flatten(), n)
        places, wanted = hidden.flatten(0, -2).index_select(0, first), labels.flatten()[first].clamp(min=0)  # (n, d), (n,)
        parts = [*zip(places.split(chunk), wanted.split(chunk), strict=True)]
        if len(parts) == 1:
            return likelihoods(*parts[0])[:n]
        return torch.cat([checkpoint(likelihoods, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])[:n]

    return read


def row_likelihoods(labels: Tensor, chunk: int = CHUNK) -> Callable[[Tensor, Head, Context], Tensor]:
    """A reader: (b,) the log-likelihood of the labels of each row."""
    each = label_likelihoods(labels, chunk)

    def read(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        found = each(hidden, head, ctx)
        return found.new_zeros(len(labels)).index_add(0, torch.nonzero(labels != IGNORED)[:, 0], found)

    return read
