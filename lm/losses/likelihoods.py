"""The likelihood of each label, for losses that compare answers: logits exist only chunk by chunk, in the backward again."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lm.losses.cross_entropy import ALL
from lm.losses.tokens import at_a_time, labelled_first
from lm.nn.batch import IGNORED
from lm.nn.context import Context
from lm.nn.head import CHUNK, Head, Reader
from lm.ops.linear import recurring
from lm.ops.once_differentiable import once_differentiable
from lm.ops.precision import uncached_casts, wide_dtype


class _Likelihoods(torch.autograd.Function):
    """log p of each label in float32 or wider; the gradient is written over the logits.  logits: (n, v); labels: (n,), none negative."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.temperature, label = temperature, labels.unsqueeze(-1)
        return torch.cat([logs.gather(-1, label[rows]).squeeze(-1) for rows, logs in _log_softmax(logits, temperature)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        label, g = labels.unsqueeze(-1), gradient.unsqueeze(-1) / ctx.temperature
        for rows, logs in _log_softmax(logits, ctx.temperature):
            logits[rows] = logs.exp_().mul_(-g[rows]).scatter_add_(-1, label[rows], g[rows])
        return logits, None, None


def _log_softmax(logits: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Yields a few rows at a time and their log p, in memory that is used again for the next."""
    size = at_a_time(logits)
    wide = torch.empty_like(logits[:size], dtype=wide_dtype(logits))
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        yield rows, ALL.log_softmax_(wide[: len(logits[rows])].copy_(logits[rows]).div_(temperature))


def label_likelihoods(
    labels: Tensor, chunk: int = CHUNK, n: int | None = None, temperature: float = 1.0
) -> Callable[[Tensor, Head, Context], Tensor]:
    """A reader: (n,) the log-likelihood of each label that is not IGNORED, row by row, where logits are divided by the temperature. Of
    more labels than `chunk` the logits are computed again in the backward, so that never more than a chunk of them exists.  n: None: they
    are counted, for which a GPU is waited."""
    n = int((labels != IGNORED).sum()) if n is None else n

    def read(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        def likelihoods(places: Tensor, wanted: Tensor) -> Tensor:
            with uncached_casts(places.device):  # so that the gradients of chunks are summed in float32
                found: Tensor = _Likelihoods.apply(head(places), wanted, temperature)
            return found

        first = labelled_first(labels.flatten())[: recurring(max(n, 1))]
        places, wanted = hidden.flatten(0, -2).index_select(0, first), labels.flatten()[first].clamp(min=0)  # (n, d), (n,)
        parts = [*zip(places.split(chunk), wanted.split(chunk), strict=True)]
        if len(parts) == 1:
            return likelihoods(*parts[0])[:n].clone()  # FSDP2 warns of a view that it puts its hook on
        each = [checkpoint(likelihoods, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        return torch.cat(each)[:n].clone()

    return read


def row_likelihoods(labels: Tensor, n: int | None = None) -> Callable[[Tensor, Head, Context], Tensor]:
    """A reader: (b,) the log-likelihood of the labels of each row.  n: as in `label_likelihoods`."""
    each = label_likelihoods(labels, n=n)

    def read(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        found = each(hidden, head, ctx)
        rows = labelled_first(labels.flatten())[: len(found)] // labels.shape[1]
        return found.new_zeros(len(labels)).index_add(0, rows, found)

    return read


def label_logits(labels: Tensor, n: int | None = None) -> Callable[[Tensor, Head, Context], Tensor]:
    """A reader: (n, labels of the head) the logits at each label that is not IGNORED, row by row, in float32 or wider.  n: as in
    `label_likelihoods`."""
    n = int((labels != IGNORED).sum()) if n is None else n

    def read(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        first = labelled_first(labels.flatten())[: recurring(max(n, 1))]
        logits: Tensor = head(hidden.flatten(0, -2).index_select(0, first))[:n]  # (b, s, d) -> (n, d)
        return logits.to(wide_dtype(logits))

    return read


def row_scores(labels: Tensor) -> Reader:
    """A reader: (b,) the only logit at the label of each row, in float32 or wider."""

    def read(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        at = (labels != IGNORED).byte().argmax(-1)  # (b,)
        logits: Tensor = head(hidden[torch.arange(len(at), device=at.device), at])
        return logits.squeeze(-1).to(wide_dtype(logits), copy=True)  # no view, as above

    return read
