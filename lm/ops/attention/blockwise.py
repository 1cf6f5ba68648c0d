"""softmax(q k^T) v by torch's fused kernel on a CPU, with sinks, and its gradient by products of matrices, block by block.

Where a CPU multiplies bf16, such products are faster than the backward of the fused kernel, as long as the scores of a block stay in
the cache. Nothing more is kept for the backward than the kernel keeps. A bias has a gradient too, for which torch would write out all
scores, in float32.
"""

from itertools import product
from typing import Any

import torch
from torch import Tensor

from lm.ops.compiling import transformed
from lm.ops.once_differentiable import once_differentiable

NATIVE = torch.cpu._is_avx512_bf16_supported()  # a CPU with AMX has it too
QUERIES = 128  # of one block; in a causal row, keys that no query of the block sees are left out
SCORES = 2**21  # of one block and thread, 4 MiB


def faster(q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None, dropout: float) -> bool:
    """Whether a gradient is needed that `Blockwise` computes faster. By types and shapes alone, so that a resumed run takes the same
    path."""
    if not multiplied(v) or dropout or q.shape[-1] != v.shape[-1] or transformed():
        return False
    wanted = any(x is not None and x.requires_grad for x in (q, k, v, shown))
    return wanted and torch.is_grad_enabled()


def multiplied(v: Tensor) -> bool:
    """Whether this CPU has products of bf16, and these are such."""
    return NATIVE and v.device.type == "cpu" and v.dtype == torch.bfloat16


class Blockwise(torch.autograd.Function):
    """F.scaled_dot_product_attention, with sinks, and with a backward that recomputes the scores.

    q: (b, h, q, c); k, v: (b, g, k, c) with g dividing h, all of one dtype.  shown: what is added to the scores, broadcasting to (b, h, q,
    k).  sinks: (h,), as in `Attend`: outputs shrink by a sink's part of the softmax, and so do weights whose logsumexp it is added to.
    causal: as many keys as queries, and the lower triangle in place of `shown`.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None, sinks: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=shown, scale=scale)
        if sinks is not None:
            of_keys, logsumexp = logsumexp, torch.logaddexp(logsumexp, sinks.to(logsumexp.dtype)[:, None])  # (b, h, q)
            out = out * (of_keys - logsumexp).exp().to(out.dtype).unsqueeze(-1)
        ctx.save_for_backward(q, k, v, shown, sinks, out, logsumexp)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, shown, sinks, out, logsumexp = ctx.saved_tensors
        of_sinks = None if sinks is None else _of_sinks(grad, sinks, out, logsumexp)
        if not multiplied(v):
            return *_of_kernel(grad, q, k, v, shown, out, logsumexp, ctx.causal, ctx.scale), None, of_sinks, None, None
        backward = _one_operation if torch.compiler.is_compiling() else _backward
        wanted = ctx.needs_input_grad[3]
        *found, of_shown = backward(grad, q, k, v, shown, out, logsumexp, ctx.causal, ctx.scale, wanted)
        return *found, of_shown if wanted else None, of_sinks, None, None


def _of_sinks(grad: Tensor, sinks: Tensor, out: Tensor, logsumexp: Tensor) -> Tensor:
    """A sink's value is zero, so that a part of the softmax which goes to it is taken from the output."""
    parts = (sinks.to(logsumexp.dtype)[:, None] - logsumexp).exp()  # (b, h, q)
    return -(parts * (grad.to(parts.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)


def _of_kernel(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None, out: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found: tuple[Tensor, Tensor, Tensor] = backward(grad, q, k, v, out, logsumexp, 0.0, causal, attn_mask=shown, scale=scale)
    return found


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None, out: Tensor, logsumexp: Tensor, causal: bool, scale: float,
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    with torch.autocast("cpu", enabled=False):
        q = _with(q, -logsumexp / scale)
        wide = grad.to(logsumexp.dtype)
        grad = _with(grad, -torch.mul(wide, out, out=None if wide is grad else wide).sum(-1))
        return _gradients(q, k, grad, v, shown, causal, scale, wanted)


_one_operation = torch.library.custom_op("lm::blockwise_backward", _backward, mutates_args=())
"""_backward, of which a compiler would unroll the blocks."""


@_one_operation.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None, out: Tensor, logsumexp: Tensor, causal: bool, scale: float,
    wanted: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    like = (q, k, v, shown if shown is not None and wanted else q.new_empty(0))
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)


def _with(x: Tensor, more: Tensor) -> Tensor:
    """Returns x with two more columns that sum to `more` at twice the precision of x, so that a product adds it without rounding it."""
    high = more.to(x.dtype)
    return torch.cat([x, high.unsqueeze(-1), (more - high).to(x.dtype).unsqueeze(-1)], -1)


def _gradients(
    q: Tensor, k: Tensor, grad: Tensor, v: Tensor, shown: Tensor | None, causal: bool, scale: float, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, and that of `shown` where it is asked for.  Dao et al. 2022, arXiv:2205.14135, appendix B.  q,
    grad: with the two columns of `_with`, which subtract the logsumexp and the sum of grad * out from each of their rows."""
    (b, h, n_q, _), (g, n_k, c) = q.shape, k.shape[1:]
    q, grad = (x.unflatten(1, (g, -1)) for x in (q, grad))  # (b, h, q, c+2) -> (b, g, r, q, c+2)
    one = k.new_ones(b, g, n_k, 2)
    k, v = torch.cat([k, one], -1), torch.cat([v, one], -1)
    size = min(QUERIES, n_q)
    d_shown = q.new_zeros(0)
    if shown is not None and wanted:  # a sum of several is float32
        d_shown = shown.new_zeros(shown.shape, dtype=shown.dtype if shown.shape == (b, h, n_q, n_k) else torch.float32)
    shown = None if shown is None else shown.expand(b, h, n_q, n_k).unflatten(1, (g, -1))
    later = torch.full((size, size), float("-inf"), dtype=q.dtype).triu_(1)
    d_q, d_k, d_v = q.new_empty(*q.shape[:-1], c), q.new_zeros(b, g, n_k, c), q.new_zeros(b, g, n_k, c)
    most = max(1, SCORES * torch.get_num_threads() // (h // g * size * n_k))  # key heads of a block: of several rows, or some of one
    rows, heads = min(b, max(1, most // g)), min(g, most)
    memory = q.new_empty(2, rows * heads * (h // g) * size * n_k)  # once: new memory takes longer than what is written into it
    for row, head, start in product(range(0, b, rows), range(0, g, heads), range(0, n_q, size)):
        stop = min(start + size, n_q)
        seen = stop if causal else n_k
        at = slice(row, row + rows), slice(head, head + heads)
        those = (*at, slice(None), slice(start, stop))  # (rows, heads, r, q, ...)
        asking, asked = (x[those].flatten(0, 1).flatten(1, 2) for x in (q, grad))  # (n, r*q, c+2)
        keys, values, to_keys, to_values = (x[at].flatten(0, 1)[:, :seen] for x in (k, v, d_k, d_v))  # (n, k, c or c+2)
        weights, d_scores = (x[: asking[..., 0].numel() * seen].view(*asking.shape[:2], seen) for x in memory)  # (n, r*q, k)
        if shown is not None:
            weights.view_as(shown[those][..., :seen]).copy_(shown[those][..., :seen])
        weights.baddbmm_(asking, keys.mT, beta=0 if shown is None else 1, alpha=scale)
        if causal:
            weights.unflatten(1, (-1, stop - start))[..., start:].add_(later[: stop - start, : stop - start])
        weights.exp_()
        to_values.baddbmm_(weights.mT, asked[..., :c])
        torch.bmm(asked, values.mT, out=d_scores).mul_(weights)
        d_q[those] = torch.bmm(d_scores, keys[..., :c]).mul_(scale).view_as(d_q[those])
        to_keys.baddbmm_(d_scores.mT, asking[..., :c], alpha=scale)
        if len(d_shown):
            of_block = d_scores.view(*d_q[those].shape[:-1], seen).flatten(1, 2)  # (rows, heads, r, q, k) -> (rows, heads * r, q, k)
            _add(d_shown, of_block, (row, head * (h // g), start, 0))
    return d_q.flatten(1, 2), d_k, d_v, d_shown.to(k.dtype)


def _add(total: Tensor, part: Tensor, starts: tuple[int, ...]) -> None:
    """Adds a part to what begins in `total` at these places, as a sum over the dimensions that `total` has one of."""
    for dim, start in enumerate(starts):
        if total.shape[dim] > 1:
            total = total.narrow(dim, start, part.shape[dim])
        elif part.shape[dim] > 1:
            part = part.sum(dim, keepdim=True, dtype=total.dtype)
    total.add_(part)
