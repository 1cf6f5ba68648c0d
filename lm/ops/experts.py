"""Tokens through their experts: rows are sorted by expert, multiplied with their expert's matrix, and summed back by token."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.ops.linear import by_onednn, outer_into, product_into, recurring
from lm.ops.once_differentiable import once_differentiable
from lm.ops.precision import wide, wide_dtype


class Sorting:
    """The order of rows, one for each choice of each token, by expert. Choice j of token t is row `back[t, j]`."""

    def __init__(self, experts: Tensor, n: int) -> None:
        """experts: (t, k), the chosen ones of n."""
        self.chosen, order = experts.flatten().sort(stable=True)  # (t, k) -> (t*k)
        self.ends = torch.searchsorted(self.chosen, torch.arange(n, device=order.device), right=True, out_int32=True)
        """Behind the rows of each expert.  (n,) int32."""
        self.token = order // experts.shape[1]
        self.back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)).view_as(experts)

    def spread(self, x: Tensor) -> Tensor:
        """Returns the token of each sorted row.  (t, d) -> (t*k, d)."""
        rows: Tensor = _Spread.apply(x, self.token, self.back)
        return rows

    def gather(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum of the rows of each token, summed in float32 or wider.  (t*k, d), (t, k) -> (t, d)."""
        out: Tensor = _Gather.apply(rows, weights, self.token, self.back)
        return out


class _Spread(torch.autograd.Function):
    """x[token]; the backward sums rows that it looks up, where indexing would scatter them one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return _summed(gradient, None, back), None, None


class _Gather(torch.autograd.Function):
    """sum_j weights[:, j] rows[back[:, j]]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, token: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, token, back)
        return _summed(rows, weights, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, token, back = ctx.saved_tensors
        of_rows = gradient.index_select(0, token)  # (t, d) -> (t*k, d)
        of_weights = (wide(of_rows) * rows).sum(-1).to(weights.dtype)[back]  # (t*k, d) -> (t*k,) -> (t, k)
        by_row = weights.new_empty(len(rows)).scatter_(0, back.flatten(), weights.flatten())  # (t, k) -> (t*k)
        return of_rows.mul_(by_row.unsqueeze(-1)), of_weights, None, None


def _summed(rows: Tensor, weights: Tensor | None, back: Tensor) -> Tensor:
    """The last sum is a tensor of its own: torch 2.11's compiler loses the gradients of a function that returns what it has written
    over."""
    total, most = rows.new_zeros(len(back), rows.shape[1], dtype=wide_dtype(rows)), back.shape[1]
    for j in range(most):
        chosen, out = rows.index_select(0, back[:, j]), None if j == most - 1 else total
        total = torch.add(total, chosen, out=out) if weights is None else torch.addcmul(total, chosen, weights[:, j, None], out=out)
    return total if total.dtype == rows.dtype else total.to(rows.dtype)


def by_expert(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, chosen: Tensor) -> Tensor:
    """x[rows of expert i] @ weight[i]^T + bias[i].  x: (n, in), rows of one expert side by side, up to
    `ends`, (e,) int32; chosen: (n,) the expert of each row."""
    aligned = weight.shape[-1] % 8 == 0 and weight.shape[-2] % 8 == 0
    if x.device.type in ("cuda", "meta") and x.dtype == torch.bfloat16 and aligned:  # what the grouped kernel takes
        out = F.grouped_mm(x, weight.to(x.dtype).transpose(-1, -2), offs=ends)
    else:
        out = torch.ops.lm.matmul_by_expert(x, weight.to(x.dtype), ends)
    return out if bias is None else out + bias[chosen].to(out.dtype)


def _cuts(ends: Tensor) -> list[tuple[int, int, int]]:
    """Each expert's number, and where its rows begin and end."""
    stops = ends.tolist()
    return [*zip(range(len(stops)), [0, *stops[:-1]], stops, strict=True)]


def _span(x: Tensor, first: int, last: int, width: int) -> tuple[int, int]:
    """Returns begin and end of the rows of x that are multiplied for the expert's rows first..last-1, to `width` numbers each.
    For oneDNN there are more than the expert's own, so that few numbers of rows occur (`recurring`)."""
    n, size = len(x), last - first
    if by_onednn(x, size * x.shape[1] * width):
        size = recurring(size)
    return (first, first + size) if first + size <= n else (max(n - size, 0), n)


def _matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out = x.new_empty(len(x), weight.shape[1])
    for i, first, last in _cuts(ends):
        begin, end = _span(x, first, last, out.shape[1])
        into = out[first:end] if begin == first else out.new_empty(end - begin, out.shape[1])
        product_into(into, x[begin:end], weight[i])  # the experts that follow write over the rows behind its own
        if begin < first:
            out[first:last] = into[first - begin : last - begin]
    return out


def _outer(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    out = x.new_empty(len(ends), gradient.shape[1], x.shape[1])
    for i, first, last in _cuts(ends):
        begin, end = _span(x, first, last, gradient.shape[1])
        own = F.pad(gradient[first:last], (0, 0, first - begin, end - last)) if end - begin > last - first else gradient[first:last]
        outer_into(out[i], own, x[begin:end])
    return out


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    of_x, of_weight, _ = ctx.needs_input_grad
    return (
        torch.ops.lm.matmul_by_expert(gradient, weight.transpose(-1, -2), ends) if of_x else None,
        torch.ops.lm.outer_by_expert(gradient, x, ends) if of_weight else None,
        None,
    )


# Custom operations, opaque to torch.compile: it cannot trace sizes that depend on data, and would break the graph of a model.
# Not by torch.library.custom_op: calls to its operations load the compiler.
_OURS = torch.library.Library("lm", "FRAGMENT")
_OURS.define("matmul_by_expert(Tensor x, Tensor weight, Tensor ends) -> Tensor")
_OURS.define("outer_by_expert(Tensor gradient, Tensor x, Tensor ends) -> Tensor")
_OURS.impl("matmul_by_expert", _matmul, "CompositeExplicitAutograd")
_OURS.impl("outer_by_expert", _outer, "CompositeExplicitAutograd")
torch.library.register_fake("lm::matmul_by_expert", lambda x, weight, ends: x.new_empty(len(x), weight.shape[1]), lib=_OURS)
torch.library.register_fake(
    "lm::outer_by_expert", lambda gradient, x, ends: x.new_empty(len(ends), gradient.shape[1], x.shape[1]), lib=_OURS
)
torch.library.register_autograd(
    "lm::matmul_by_expert", _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs), lib=_OURS
)
