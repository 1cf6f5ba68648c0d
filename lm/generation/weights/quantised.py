"""Matrices quantised to 8 bits, with a scale for each output, or to 4 bits, with a scale and a zero for each 32 inputs of an output."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.generation.weights.inference_linear import InferenceLinear, by_hand
from lm.ops.int8 import int8_rows, of_int8_rows

GROUP = 32  # inputs of one output that share a scale in int4
_ALIGNED = 32  # the kernel of int8 reads beyond rows that are no multiple of 16: seen to crash
_AT_ONCE = 64  # rows of a matrix that is quantised: as much as stays in the processor's cache, several times as fast
_FEW = 64  # rows up to which int8 has its kernel, so that a step of a batch rounds as a step alone does
_ROWS = 4  # multiplied at a time, where the kernels are fastest for each row


def by_rows(kernel: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns the products of all rows, computed a few rows at a time, as the kernel is fastest.  x: (.., in); kernel: (n, in) -> (n,
    out)."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # as the kernels want them, and the last place of several rows is not
    out = kernel(rows) if len(rows) <= _ROWS else torch.cat([kernel(piece) for piece in rows.split(_ROWS)])
    return out.view(*x.shape[:-1], -1)


class Int8Reference(InferenceLinear):
    """W = scale q with q in -127 .. 127 and a bfloat16 scale for each output; multiplied by F.linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.takes = torch.bfloat16
        self.q, self.scale = int8_rows(weight)

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.q.to(x.dtype)) * self.scale

    def row(self, x: Tensor) -> Tensor:
        return by_hand(x, self.q) * self.scale.to(x.dtype)

    def matrix(self) -> Tensor:
        return of_int8_rows(self.q, self.scale)


class Int8(Int8Reference):
    """As Int8Reference, but with torch's kernel for few rows; for more, as in prefill, the reference is up to 2.8 times as fast."""

    @classmethod
    def fits(cls, weight: Tensor) -> bool:
        return weight.device.type == "cpu" and weight.shape[1] % _ALIGNED == 0

    def product(self, x: Tensor) -> Tensor:
        if x.numel() > _FEW * self.in_features:
            return super().product(x)
        return by_rows(lambda rows: torch._weight_int8pack_mm(rows, self.q, self.scale), x)


def levels(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q in 0 .. 15, (out, in), and scale and zero in bfloat16, (out, groups), with W about scale (q - 8) + zero: the range of each
    group in 15 steps."""
    if len(weight) > _AT_ONCE:
        q, scale, zero = map(torch.cat, zip(*map(levels, weight.split(_AT_ONCE)), strict=True))
        return q, scale, zero
    w = weight.float().unflatten(1, (-1, GROUP))  # (out, in) -> (out, groups, group)
    low, high = w.amin(2), w.amax(2)
    scale = ((high - low) / 15).clamp(min=1e-30).to(torch.bfloat16)
    zero = ((high + low + scale.float()) / 2).to(torch.bfloat16)  # the middle of 0 .. 15 is 7.5
    steps = (w - zero.float().unsqueeze(2)) / scale.float().unsqueeze(2)  # of the rounded ones
    return steps.round_().add_(8).clamp_(0, 15).flatten(1).to(torch.uint8), scale, zero


class Int4Reference(InferenceLinear):
    """W = scale (q - 8) + zero with q in 0 .. 15, and a bfloat16 scale and zero for every 32 inputs of an output."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.takes = torch.bfloat16
        self.q, self.scale, self.zero = levels(weight)

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix().to(x.dtype))

    def matrix(self) -> Tensor:
        wide = (self.q.float() - 8).unflatten(1, (-1, GROUP)) * self.scale.float().unsqueeze(2) + self.zero.float().unsqueeze(2)
        return wide.flatten(1)  # (out, groups, group) -> (out, in)


class Int4(InferenceLinear):
    """As Int4Reference, but with torch's kernel, which packs two numbers into a byte."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.takes = torch.bfloat16
        q, scale, zero = (F.pad(each, (0, 0, 0, -len(weight) % 16)) for each in levels(weight))  # the kernel wants 16 outputs at a time
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
        self.scales = torch.stack([scale.t(), zero.t()], dim=2).contiguous()  # (groups, out, 2)
        self.multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    @classmethod
    def fits(cls, weight: Tensor) -> bool:
        return weight.device.type == "cpu"

    def product(self, x: Tensor) -> Tensor:
        return by_rows(lambda rows: self.multiply(rows, self.packed, GROUP, self.scales), x)[..., : self.out_features]

    def matrix(self) -> Tensor:
        return self.product(torch.eye(self.in_features, dtype=self.takes)).t()
