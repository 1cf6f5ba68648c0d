"""Differential attention: the attention of half of the heads is subtracted from that of the others.  Ye et al. 2024, arXiv:2410.05258."""

import math
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.activation_memory import Activations, sum_activations
from lm.nn.init import InitContext
from lm.nn.mixers.base import Mixer
from lm.nn.mixers.grouped import GQA, GroupedConfig
from lm.nn.norm import NormConfig
from lm.nn.position.base import Position
from lm.ops.attention.mask import Mask


class DifferentialConfig(GroupedConfig):
    """norm((softmax(q1 k1) - share softmax(q2 k2)) v), with a learned share of each layer; two heads are one of twice the width."""

    kind: Literal["differential"] = "differential"
    eps: float = Field(1e-6, ge=1e-30)
    """Added to the mean square in the norm of what is read."""

    @model_validator(mode="after")
    def _heads_pair(self) -> Self:
        if self.kv_heads % 2:
            n = f"n_heads={self.n_heads}" if self.n_kv_heads is None else f"n_kv_heads={self.n_kv_heads}"
            raise ValueError(f"{n} is odd, and attention=differential takes half of the heads off the others. Use an even number.")
        if self.qk_norm in ("rotated", "l2"):
            raise ValueError(f"qk_norm={self.qk_norm} has no form in attention=differential. Use qk_norm=head.")
        return self

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return Differential(self, norm, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        """Values are twice as wide as in GQA; that scores are computed again for each half of the values does not count."""
        return super().flops(d_model, layer, seq_len) * 3 // 2

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """In addition, each half of the values repeated, both halves' outputs and their concatenation, the difference and its norm."""
        q = self.n_heads * self.width(d_model)
        return sum_activations([super().saved_activations(d_model, layer), Activations(0, self.kv_width(d_model) + 5 * q)])

    def saved_scores(self, seq_len: int, device: str) -> Activations:
        """Attention runs once for each half of the values."""
        return sum_activations([super().saved_scores(seq_len, device)] * 2)

    def kernel_outputs(self, d_model: int, layer: int) -> Activations:
        """Attention runs once for each half of the values."""
        return sum_activations([super().kernel_outputs(d_model, layer)] * 2)


def tenth(shape: torch.Size, init: InitContext) -> Tensor:
    """N(0, 0.1^2)."""
    return init.normal(shape, 0.1)


class Differential(GQA):
    """Heads i and h/2 + i of the queries are a pair. Both read the concatenated values of a pair of value heads, i and g/2 + i of g.

    As in transformers' DiffLlama the norm has no weight. The share is the paper's, exp(q1 k1) - exp(q2 k2) + start of learned vectors q1 to
    k2, where start grows with depth.
    """

    initializers = {**GQA.initializers, **{f"lambda_{name}": tenth for name in ("q1", "k1", "q2", "k2")}}

    def __init__(self, cfg: DifferentialConfig, norm: NormConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, norm, d_model, layer)
        self.eps, self.start = cfg.eps, 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (nn.Parameter(torch.empty(self.head_dim)) for _ in range(4))

    def share(self) -> Tensor:
        """Returns the factor on the second half of the heads before it is subtracted, a float32 number.  Section 2.1, eq. 2."""
        first, second = self.lambda_q1.float() * self.lambda_k1.float(), self.lambda_q2.float() * self.lambda_k2.float()
        return first.sum().exp() - second.sum().exp() + self.start

    def weighted(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, position: Position | None) -> Tensor:
        """Attends to each half of the values by itself, since fused kernels want values as wide as keys."""
        halves = (half.repeat(1, 2, 1, 1) for half in v.chunk(2, 1))  # (b, g, k, c) -> twice (b, g/2, k, c) -> (b, g, k, c)
        read = torch.cat([super(Differential, self).weighted(q, k, half, mask, position) for half in halves], -1)
        more, less = read.chunk(2, 1)  # (b, h, s, 2c) -> twice (b, h/2, s, 2c)
        told = F.rms_norm(more - self.share().to(v.dtype) * less, (2 * self.head_dim,), eps=self.eps) * (1 - self.start)
        return told.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)  # (b, h/2, s, 2c) -> (b, h, s, c), a pair side by side
