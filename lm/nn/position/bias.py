"""Positions as biases on the attention scores."""

import math
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from lm.nn.cost.kept import Kept
from lm.nn.position.base import Dims, Position, PositionConfig
from lm.schema import MOST


class AlibiConfig(PositionConfig):
    """Each head subtracts a slope of its own times the distance (Press et al. 2021, arXiv:2108.12409)."""

    kind: Literal["alibi"] = "alibi"
    acts: ClassVar[Literal["embed", "rotate", "bias"]] = "bias"

    def build(self, dims: Dims) -> Position:
        return Alibi(dims.n_heads)


class Alibi(Position):
    """bias = -slope[head] * |query - key|."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(n_heads)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        distance = (q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)).abs().float()  # (b, q, k)
        slopes = torch.tensor(self.slopes, device=distance.device)
        return -slopes[:, None, None] * distance.unsqueeze(1)  # (b, 1, q, k) -> (b, h, q, k)


class T5RelativeConfig(PositionConfig):
    """A learned bias per head and bucket of distance, shared by all layers (Raffel et al. 2019, arXiv:1910.10683, section 2.1)."""

    kind: Literal["t5_relative"] = "t5_relative"
    acts: ClassVar[Literal["embed", "rotate", "bias"]] = "bias"
    n_buckets: int = Field(32, gt=3, multiple_of=2, le=MOST)
    """Rows of the table; bidirectional stacks use half for each direction."""
    max_distance: int = Field(128, gt=1)
    """Distances from here on share the last bucket."""

    @model_validator(mode="after")
    def _far_is_far(self) -> Self:
        if self.max_distance <= self.n_buckets // 2:
            raise ValueError(
                f"max_distance={self.max_distance} leaves nothing to share beyond the {self.n_buckets // 2} exact distances of"
                f" n_buckets={self.n_buckets}. Raise max_distance, or lower n_buckets."
            )
        return self

    def build(self, dims: Dims) -> Position:
        return T5Relative(self, dims)

    def keeps(self, n_heads: int, seq_len: int) -> Kept:
        """Its bias has a gradient, for which no kernel is fused."""
        return Kept(0, n_heads * seq_len)


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(-8i/n) for a power of two; else those of the power below, then every second one of the power above."""
    below = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * i / below) for i in range(1, below + 1)]
    return slopes + [2 ** (-4 * i / below) for i in range(1, 2 * (n_heads - below), 2)]


def t5_buckets(distance: Tensor, n_buckets: int, max_distance: int, causal: bool) -> Tensor:
    """The bucket of key - query: exact up to a half of the buckets, then logarithmic up to max_distance."""
    side = torch.zeros_like(distance)
    if causal:
        back = -distance.clamp(max=0)
    else:
        n_buckets //= 2
        side, back = (distance > 0).long() * n_buckets, distance.abs()
    exact = n_buckets // 2
    growth = torch.log(back.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (n_buckets - exact)
    far = (exact + growth.long()).clamp(max=n_buckets - 1)
    return side + torch.where(back < exact, back, far)


class T5Relative(Position):
    """bias = table[bucket(key - query), head]."""

    def __init__(self, cfg: T5RelativeConfig, dims: Dims) -> None:
        super().__init__()
        self.cfg, self.causal = cfg, dims.causal
        self.table = nn.Embedding(cfg.n_buckets, dims.n_heads)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        distance = k_positions.unsqueeze(-2) - q_positions.unsqueeze(-1)  # (b, q, k)
        bias: Tensor = self.table(t5_buckets(distance, self.cfg.n_buckets, self.cfg.max_distance, self.causal))
        return bias.permute(0, 3, 1, 2)  # (b, q, k, h) -> (b, h, q, k)
