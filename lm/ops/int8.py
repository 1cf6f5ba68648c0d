"""Matrices of 8-bit integers, with a scale for each row."""

import torch
from torch import Tensor


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q in -127 .. 127, (out, in), and a bfloat16 scale for each row, (out,): W is about scale q."""
    wide = weight.float()
    scale = (wide.abs().amax(1) / 127).clamp(min=1e-30).to(torch.bfloat16)
    return (wide / scale.float().unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8), scale  # q is computed with the rounded scale


def of_int8_rows(q: Tensor, scale: Tensor) -> Tensor:
    """Returns scale q, in float32."""
    return q.float() * scale.float().unsqueeze(1)
