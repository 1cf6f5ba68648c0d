"""Rotary embeddings: pairs of numbers rotated by angles that grow with position.  Su et al. 2021, arXiv:2104.09864, section 3.2."""

from typing import Any

import torch
from torch import Tensor

from lm.ops.compiling import written_out


def rope_angles(positions: Tensor, rates: Tensor, amplitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of position * rate, float32, (b, s) -> (b, 1, s, r/2).  rates: (r/2,).

    Computed from integers at each forward: a stored buffer would be rounded by a cast to bf16 and lost on the meta device.
    """
    angles = positions[:, None, :, None].float() * rates  # (b, s) -> (b, 1, s, r/2)
    return angles.cos() * amplitude, angles.sin() * amplitude


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + r/2]) by their angle, in float32; dimensions from r on pass through.  x: (b, h, s, c)."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1) if rest.shape[-1] else turned.to(x.dtype)


class _RotateHalf(torch.autograd.Function):
    """rotate_half whose gradient is the rotation by the opposite angle: nothing but cos and sin is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x.float(), cos, sin).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grads[0], cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    out = torch.empty_like(x)
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """rotate_half by a fused path, or in its plain form, `written_out`."""
    if not written_out():
        out: Tensor = _RotateHalf.apply(x, cos, sin) if x.requires_grad else _turn(x.float(), cos, sin).to(x.dtype)
        return out
    return rotate_half(x, cos, sin)


def deinterleave(x: Tensor, rotary_dim: int) -> Tensor:
    """Neighbouring pairs moved half a head apart, as `rotate` takes them. Queries and keys are both moved, so scores are the same."""
    pairs = x[..., :rotary_dim].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)  # (.., r/2, 2) -> (.., r)
    return torch.cat([pairs, x[..., rotary_dim:]], dim=-1) if rotary_dim < x.shape[-1] else pairs
