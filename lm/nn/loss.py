"""Next-token losses as sums over label tokens. Logits exist only chunk by chunk."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.nn.batch import IGNORED
from lm.nn.context import Context
from lm.nn.head import CHUNK, Head, Reader
from lm.nn.mtp import shifted


@dataclass
class LossSums:
    """Sums over label tokens: `total` is minimised (smoothing, z-loss and auxiliary losses included), `nll` is reported, in nats."""

    total: Tensor
    nll: Tensor
    loads: Tensor | None = None  # (MoE layers, e), tokens per expert of this forward; None where there are no experts


def token_losses(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0) -> LossSums:
    """logits: (n, v), labels: (n,) with IGNORED where nothing is predicted; computed in float32."""
    logits = logits.float()
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    nll = total.detach()
    if label_smoothing:
        nll = F.cross_entropy(logits.detach(), labels, ignore_index=IGNORED, reduction="sum")
    if z_loss:
        log_z = logits.logsumexp(-1)
        total = total + z_loss * (log_z.square() * (labels != IGNORED)).sum()
    return LossSums(total, nll)


class _Chunked(torch.autograd.Function):
    """Sum of token_losses over chunks. Each chunk's gradient is taken at once, so that its logits can go: the same work as the
    plain loss, and memory for one chunk. `parameters` are the head's, named so that autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, head: Head, extras: tuple[float, float], chunk: int, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), device=hidden.device, dtype=torch.float32)
        nll = torch.zeros_like(total)
        d_hidden = torch.empty_like(hidden)
        d_parameters: list[Tensor] = []  # in float32, whatever the weights are
        for start in range(0, len(hidden), chunk):
            span = slice(start, start + chunk)
            with torch.enable_grad():
                piece = hidden[span].detach().requires_grad_()
                sums = token_losses(head(piece), labels[span], *extras)
                d_piece, *grads = torch.autograd.grad(sums.total, (piece, *parameters))
            d_hidden[span] = d_piece
            d_parameters = [g.float() for g in grads] if start == 0 else [d.add_(g) for d, g in zip(d_parameters, grads, strict=True)]
            total += sums.total.detach()
            nll += sums.nll
        ctx.save_for_backward(d_hidden, *(mine.to(p.dtype) for mine, p in zip(d_parameters, parameters, strict=True)))
        ctx.mark_non_differentiable(nll)
        return total, nll

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, *d_parameters = ctx.saved_tensors
        return d_hidden * grads[0], None, None, None, None, *(d * grads[0] for d in d_parameters)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chunked_loss(
    hidden: Tensor, labels: Tensor, head: Head, label_smoothing: float = 0.0, z_loss: float = 0.0, chunk: int = CHUNK
) -> LossSums:
    """token_losses(head(hidden), labels) without ever holding more than `chunk` rows of logits.  hidden: (..., d), labels: (...)."""
    hidden, labels = hidden.flatten(0, -2), labels.flatten()  # (b, s, d) -> (b*s, d)
    extras = (label_smoothing, z_loss)
    if torch.is_grad_enabled():
        trainable = [p for p in head.parameters() if p.requires_grad]
        return LossSums(*_Chunked.apply(hidden, labels, head, extras, chunk, *trainable))
    pieces = [token_losses(head(h), y, *extras) for h, y in zip(torch.split(hidden, chunk), torch.split(labels, chunk), strict=True)]
    return LossSums(torch.stack([p.total for p in pieces]).sum(), torch.stack([p.nll for p in pieces]).sum())


def causal_reader(labels: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0, chunk: int = CHUNK) -> Reader:
    """What to pass as `loss` to a model's forward: LossSums over the label tokens of this batch.  labels: (b, s)."""

    def read(hidden: Tensor, head: Head, ctx: Context) -> LossSums:
        sums = chunked_loss(hidden, labels, head, label_smoothing, z_loss, chunk)
        total = sums.total
        for n, further in enumerate(ctx.mtp, 1):
            later = chunked_loss(further, _later_labels(labels, n, ctx.mask.q_documents), head, label_smoothing, z_loss, chunk)
            total = total + later.total * (ctx.mtp_weight / len(ctx.mtp))
        aux = ctx.auxiliary
        if aux.losses:  # per row, each row by its labels: a mean over tokens, as the loss is
            total = total + (torch.stack(list(aux.losses.values())).sum(0) * (labels != IGNORED).sum(-1)).sum()
        return LossSums(total, sums.nll, torch.stack(list(aux.loads.values())) if aux.loads else None)

    return read


def _later_labels(labels: Tensor, n: int, documents: Tensor | None) -> Tensor:
    """The label n places later, where that is still in the same document."""
    later = shifted(labels, n, IGNORED)
    return later if documents is None else later.masked_fill(shifted(documents, n, -1) != documents, IGNORED)
