"""Layers of a model with fewer and larger operations, for decoding on a CPU. Each computes what the readable one does, up to rounding."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lm.nn.context import Context
from lm.nn.ffn.mlp import GatedMLP
from lm.nn.mixers.gqa import GQA
from lm.nn.mixers.mask import Mask
from lm.nn.norm import RMSNorm
from lm.nn.position.base import Position

Hold = Callable[[Tensor, Tensor | None], nn.Module]
"""From a matrix and its bias to what multiplies by it."""


def stacked(linears: Sequence[nn.Linear], hold: Hold) -> nn.Module:
    """Returns one layer for several that read the same; what it gives is theirs side by side."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return hold(torch.cat([linear.weight.detach() for linear in linears]), torch.cat(biases) if biases else None)


class QuickRMSNorm(nn.Module):
    """x / sqrt(|x|^2 + d eps) * sqrt(d) weight, in float32: half as many operations as torch's own on a CPU."""

    def __init__(self, gain: Tensor, eps: float) -> None:
        """gain: (.., d), of which leading dimensions are those of the input, as of heads with weights of their own."""
        super().__init__()
        d = gain.shape[-1]
        self.gain, self.floor = gain.float() * math.sqrt(d), torch.tensor(math.sqrt(d * eps))

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / length.hypot_(self.floor)).mul_(self.gain).to(x.dtype)


class FusedMLP(GatedMLP):
    """Gate and up are one matrix."""

    def __init__(self, of: GatedMLP, hold: Hold) -> None:
        nn.Module.__init__(self)
        self.gate_up, self.down, self.combine = stacked([of.gate, of.up], hold), of.down, of.combine

    @staticmethod
    def fits(of: GatedMLP) -> bool:
        """Whether there is no adapter beside the matrices."""
        return all(type(linear) is nn.Linear for linear in (of.gate, of.up))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(self.combine(gate, up))
        return out


class FusedGQA(GQA):
    """Queries, keys and values come of one matrix; queries and keys are normed and rotated together."""

    def __init__(self, of: GQA, hold: Hold) -> None:
        nn.Module.__init__(self)
        self.layer, self.head_dim, self.how, self.quiet = of.layer, of.head_dim, of.how, of.quiet
        self.sinks, self.attend, self.o, self.gate, self.said = of.sinks, of.attend, of.o, of.gate, of.extra_repr()
        self.heads = [linear.out_features // of.head_dim for linear in (of.q, of.k, of.v)]
        self.qkv, self.norm = stacked([of.q, of.k, of.v], hold), None
        if isinstance(of.q_norm, RMSNorm) and isinstance(of.k_norm, RMSNorm):
            gains = [norm.gain().expand(heads, -1) for norm, heads in zip((of.q_norm, of.k_norm), self.heads, strict=False)]
            self.norm = QuickRMSNorm(torch.cat(gains), of.q_norm.eps)

    @staticmethod
    def fits(of: GQA) -> bool:
        """Whether there are no norms of queries and keys, or of each head, and no adapter beside the matrices."""
        normed = isinstance(of.q_norm, nn.Identity) or (isinstance(of.q_norm, RMSNorm) and not of.norm_full)
        return normed and all(type(linear) is nn.Linear for linear in (of.q, of.k, of.v))

    def extra_repr(self) -> str:
        return self.said

    def projected(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.heads
        qk, values = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split([q + k, v], dim=2)  # (b, s, (h+2g)*c) -> (b, s, h+g, c)
        if self.norm is not None:
            qk = self.norm(qk)
        qk = ctx.position.rotate(qk.transpose(1, 2), ctx.angles, self.layer)  # (b, s, h+g, c) -> (b, h+g, s, c)
        return (*qk.split([q, k], dim=1), values.transpose(1, 2))

    def weighted(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, position: Position | None) -> Tensor:
        """One token's queries that share keys are as several queries of one head, which copies no keys; torch's kernel does in bfloat16."""
        bias = None if position is None else mask.once("bias", lambda: position.bias(mask.q_positions, mask.k_positions))
        if q.shape[2] > 1 or bias is not None or self.sinks is not None:
            return super().weighted(q, k, v, mask, position)
        shared = q.squeeze(2).unflatten(1, (k.shape[1], -1))  # (b, h, 1, c) -> (b, g, h/g, c)
        return self.attend(shared, k, v, mask, None, self.quiet, None).flatten(1, 2).unsqueeze(2)  # -> (b, h, 1, c)
