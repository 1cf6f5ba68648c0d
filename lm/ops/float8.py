"""W x with the products of forward and backward in float8, for GPUs that have it.  Micikevicius et al. 2022, arXiv:2209.05433."""

from typing import Any

import torch
from torch import Tensor

from lm.ops.linear import product
from lm.ops.once_differentiable import once_differentiable

NUMBERS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2  # section 3: inputs and weights need more digits, gradients more range
ROUND = 16  # inputs and outputs must be multiples of this for the kernels


def by_float8(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W x + b in the dtype of autocast, or of x. Without gradients, as in validation, it is not in float8 but the usual product."""
    if not torch.is_grad_enabled():
        return product(x, weight, bias)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    out: Tensor = _Float8.apply(x, weight)
    return out if bias is None else out + bias.to(out.dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns x / scale in float8, row by row, and the scale, a float32 number that makes the largest of x the largest of the format."""
    x, most = x.contiguous(), torch.finfo(dtype).max  # the CUDA kernels need it row by row
    scale = (x.abs().amax().float() / most).clamp_min(1e-30)
    return (x.float() / scale).clamp(-most, most).to(dtype), scale


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """W x of the rounded numbers, in float32.  (..., in), (out, in) -> (..., out)."""
    (q, s), (w, t) = rounded(x, NUMBERS), rounded(weight, NUMBERS)
    return (q.float() * s) @ (w.float() * t).mT


class _Float8(torch.autograd.Function):
    """Saves x and the weight for the backward, as any linear layer, and rounds them again there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        (q, s), (w, t) = rounded(x.flatten(0, -2), NUMBERS), rounded(weight, NUMBERS)
        return _scaled(q, w.t(), s, t, x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        outs, ins = gradient.flatten(0, -2), x.flatten(0, -2)  # (..., out), (..., in) -> (n, out), (n, in)
        g, u = rounded(outs, GRADIENTS)
        dx = dw = None
        if of_x:
            w, t = rounded(weight, NUMBERS)
            dx = _scaled(g, _columns(w), u, t, x.dtype).view_as(x)
        if of_weight and len(ins) % ROUND:  # no kernel sums over other lengths
            dw = (outs.mT @ ins).to(weight.dtype)
        elif of_weight:
            q, s = rounded(ins, NUMBERS)
            dw = _scaled(g.t().contiguous(), _columns(q), u, s, x.dtype).to(weight.dtype)
        return dx, dw


def _scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """(a scale_a) (b scale_b).  a: (n, k), row by row; b: (k, m), column by column."""
    out: Tensor = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)
    return out


def _columns(x: Tensor) -> Tensor:
    """x, stored column by column."""
    return x.t().contiguous().t()
