"""Normalisation by the root of the mean square: a formula to read, and the fastest path that is exact here."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.ops.compiling import written_out
from lm.ops.once_differentiable import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32, returned in x.dtype.

    x: (..., d); weight: (d,), or what broadcasts to x.  Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


class _RMSNormCPU(torch.autograd.Function):
    """rms_norm with a fused backward: on CPU the gradient of torch's own is a chain of unfused passes, 5 to 15 times slower.

    LayerNorm's backward kernel, given mean 0, lacks only the term that its mean would have contributed; that is added by hand.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_().div_(x.shape[-1])
        inverse = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        out = x.float() * inverse
        return (out if weight is None else out.mul_(weight)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        w, d = None if weight is None else weight.to(inverse.dtype), x.shape[-1]
        g, wide = grads[0].to(inverse.dtype), x.to(inverse.dtype)
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            g, wide, [d], torch.zeros_like(inverse), inverse, w, None, [True, w is not None, False]
        )
        dx.addcmul_((g.sum(-1) if w is None else g @ w).unsqueeze(-1), inverse / d)
        return dx.to(x.dtype), None if weight is None else dw.to(weight.dtype), None


def fast_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """rms_norm of one weight for all rows, (d,), by the fastest path that is exact here.  weight: None is a weight of ones."""
    if x.device.type == "cpu" and x.requires_grad and x.dtype != torch.float64 and not written_out():
        out: Tensor = _RMSNormCPU.apply(x, weight, eps)
        return out
    if weight is None:
        return F.rms_norm(x, x.shape[-1:], None, eps).to(x.dtype)  # under autocast CUDA's gives float32
    return F.rms_norm(x, weight.shape, weight, eps) if x.dtype == weight.dtype else rms_norm(x, weight, eps)


def rms_norm_of_groups(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm over c within each group, with a weight for each channel of all groups or, shared, of one.  x: (..., groups, c); weight:
    (groups * c,) or (c,)."""
    return rms_norm(x, weight if weight.numel() == x.shape[-1] else weight.unflatten(0, (-1, x.shape[-1])), eps)
