"""Frozen matrices in fewer bits than they were saved in, beside which an adapter is trained."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.ops.int8 import int8_rows
from lm.ops.linear import product

Base = Literal["saved", "bf16", "int8", "nf4"]
_PIECE = 1 << 18  # elements of a matrix that are made again at a time on a CPU: larger pieces leave holes in the heap
_PIECE_ELSEWHERE = 1 << 24  # a GPU is idle between small ones
_PACKED = 1 << 20  # elements that are rounded to 4 bits at a time, with 8 bytes for each


class Held(ABC):
    """How a matrix W, (out, in), is held: as `stored`, with `scales` beside it. Whatever part of it is needed is made again."""

    group: int = 1
    """Inputs whose weights can be made again only together."""
    by_row: bool = False
    """The scales are one for each output, (out,), and multiply what comes out, where `after` says so; else each group has its own,
    (out, groups), or none."""
    packed: int = 1
    """Weights in one element of `stored`."""

    @abstractmethod
    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `stored` and `scales` of a matrix."""

    @abstractmethod
    def unpack(self, stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns whole rows of W, or whole groups of its inputs, without the scales of rows where they come `after`."""

    def after(self, dtype: torch.dtype) -> bool:
        """Returns whether the scales of rows multiply what comes out of a product in this dtype, which is less work than to multiply W. Not
        in float16: it ends at 65,504, and a sum of integers up to 127 may not."""
        return self.by_row and dtype != torch.float16

    def whole(self, stored: Tensor, scales: Tensor) -> Tensor:
        """Returns W in float32."""
        made = self.unpack(stored, scales, torch.float32)
        return made * scales.float().unsqueeze(1) if self.by_row else made

    def pieces(self, stored: Tensor, scales: Tensor, dtype: torch.dtype, dim: int) -> Iterator[Tensor]:
        """Yields W, as `unpack`, in pieces along its outputs (dim 0) or its inputs (dim 1)."""
        most = _PIECE if stored.device.type == "cpu" else _PIECE_ELSEWHERE
        n = max(1, most // (stored.shape[1] * self.packed if dim == 0 else stored.shape[0] * self.group))  # outputs, or groups of inputs
        cut = scales.split(n, dim) if scales.ndim == 2 or (self.by_row and dim == 0) else repeat(scales)
        for part, own in zip(stored.split(n if dim == 0 else n * self.group // self.packed, dim), cut, strict=False):
            yield self.unpack(part, own, dtype)


class BF16(Held):
    """Rounded to bfloat16, as most published weights are already."""

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight.bfloat16(), weight.new_empty(0)

    def unpack(self, stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return stored.to(dtype)


class Int8(Held):
    """8 bits, with a scale for each output."""

    by_row = True

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return int8_rows(weight)

    def unpack(self, stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        made = stored.to(dtype)
        return made if self.after(dtype) else made * scales.to(dtype).unsqueeze(1)


@cache
def nf4_levels() -> Tensor:
    """Returns the 16 numbers that 4 bits stand for, from -1 to 1, float32: quantiles of a normal distribution, with 0 among them.

    Dettmers et al. 2023, arXiv:2305.14314, section 3 and appendix E: 8 intervals above 0 and 7 below, the outermost quantile midway between
    those of 1/32 and of 1/30 from the end.
    """
    end = 1 - (1 / 30 + 1 / 32) / 2
    above, below = (torch.special.ndtri(torch.linspace(end, 0.5, n, dtype=torch.float64, device="cpu")[:-1]) for n in (9, 8))
    levels = torch.cat([above, -below, above.new_zeros(1)]).sort().values
    return (levels / levels.max()).float()


class NF4(Held):
    """4 bits, two weights to a byte, with a bfloat16 scale for each 64 inputs of an output."""

    group, packed = 64, 2

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        rows = max(1, _PACKED // weight.shape[1])
        stored, scales = zip(*(self._pack(part) for part in weight.split(rows)), strict=True)
        return torch.cat(stored), torch.cat(scales)

    def _pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        groups = weight.float().unflatten(1, (-1, self.group))  # (out, in) -> (out, groups, group)
        scales = groups.abs().amax(2).clamp(min=1e-30).to(torch.bfloat16)
        levels = nf4_levels().to(weight.device)
        nearest = torch.bucketize(groups / scales.float().unsqueeze(2), (levels[1:] + levels[:-1]) / 2).to(torch.uint8).flatten(1)
        return nearest[:, ::2] << 4 | nearest[:, 1::2], scales

    def unpack(self, stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        levels = nf4_levels().to(stored.device)
        pairs = torch.cartesian_prod(levels, levels)  # (256, 2): what a byte holds
        made = F.embedding(stored.int(), pairs).view(len(stored), -1, self.group)  # (out, in / 2) -> (out, groups, group)
        return (made * scales.float().unsqueeze(2)).flatten(1).to(dtype)


HELD: dict[str, Held] = {"bf16": BF16(), "int8": Int8(), "nf4": NF4()}


def multiplied(x: Tensor, stored: Tensor, scales: Tensor, held: Held) -> Tensor:
    """Returns x W^T, of the dtype that autocast asks for.  x: (.., in)."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.dtype == stored.dtype:
        return product(x, stored, None)
    out: Tensor = _OfHeld.apply(x, stored, scales, held)
    return out


class _OfHeld(torch.autograd.Function):
    """x W^T. Autograd would keep W in the dtype of x until the backward; here it is made again piece by piece, both times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, scales: Tensor, held: Held) -> Tensor:
        ctx.save_for_backward(stored, scales)
        ctx.held = held
        out = torch.cat([F.linear(x, part) for part in held.pieces(stored, scales, x.dtype, 0)], -1)
        # not in place: torch 2.11's compiler loses the gradients of a function that returns what it has written over
        return out * scales if held.after(x.dtype) else out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (stored, scales), held = ctx.saved_tensors, ctx.held
        scaled = gradient * scales if held.after(gradient.dtype) else gradient
        return torch.cat([scaled @ part for part in held.pieces(stored, scales, gradient.dtype, 1)], -1), None, None, None
