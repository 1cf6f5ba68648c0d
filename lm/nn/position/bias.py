"""Positions as biases on the attention scores."""

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from lm.errors import ConfigError
from lm.nn.activation_memory import Activations
from lm.nn.linear import Embedding
from lm.nn.position.base import Dims, Position, PositionConfig
from lm.ops.distance import alibi_slopes, t5_buckets
from lm.schema import MOST


class AlibiConfig(PositionConfig):
    """Each head subtracts a slope of its own times the distance (Press et al. 2021, arXiv:2108.12409)."""

    kind: Literal["alibi"] = "alibi"
    acts = "bias"

    def build(self, dims: Dims) -> Position:
        return Alibi(dims.n_heads)


class Alibi(Position):
    """bias = -slope[head] * |query - key|."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.slopes = torch.tensor(alibi_slopes(n_heads), device="cpu")
        self._here = self.slopes  # where the scores are

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        distance = (q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)).abs().float()  # (b, q, k)
        if self._here.device != distance.device:  # at the first call only: a copy would wait for a GPU
            self._here = self.slopes.to(distance.device)
        return -self._here[:, None, None] * distance.unsqueeze(1)  # (b, 1, q, k) -> (b, h, q, k)


class T5RelativeConfig(PositionConfig):
    """A learned bias per head and bucket of distance (Raffel et al. 2019, arXiv:1910.10683, section 2.1)."""

    kind: Literal["t5_relative"] = "t5_relative"
    acts = "bias"
    n_buckets: int = Field(32, gt=3, multiple_of=2, le=MOST)
    """Rows of the table; bidirectional stacks use half for each direction."""
    max_distance: int = Field(128, gt=1)
    """Distances from here on share the last bucket."""
    shared: bool = True
    """All layers of a stack have one table; false: each has its own (UMT5, Chung et al. 2023, arXiv:2304.09151)."""

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

    def require_layers(self, drafts: bool) -> None:
        if drafts and not self.shared:
            raise ValueError("position.shared=false has a table for each layer, and mtp's blocks are none. Set shared=true, or mtp=null.")

    def saved_activations(self, n_heads: int, seq_len: int) -> Activations:
        """Counts the scores of all heads: the bias needs a gradient, which no fused kernel computes; and the layer's own buckets."""
        return Activations(0, n_heads * seq_len, 0 if self.shared else 8 * seq_len)


class T5Relative(Position):
    """bias = table[bucket(key - query), head]; the tables of all layers, one below the other, are one matrix."""

    def __init__(self, cfg: T5RelativeConfig, dims: Dims) -> None:
        super().__init__()
        self.cfg, self.causal, self.by_layer = cfg, dims.causal, not cfg.shared
        self.table = Embedding(cfg.n_buckets * (dims.n_layers if self.by_layer else 1), dims.n_heads)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        if self.by_layer:
            raise ConfigError("position.shared=false has a bias for each layer. Ask bias_of_layer for it, or set shared=true.")
        return self.bias_of_layer(q_positions, k_positions, 0)

    def bias_of_layer(self, q_positions: Tensor, k_positions: Tensor, layer: int) -> Tensor:
        distance = k_positions.unsqueeze(-2) - q_positions.unsqueeze(-1)  # (b, q, k)
        buckets = t5_buckets(distance, self.cfg.n_buckets, self.cfg.max_distance, self.causal)
        bias: Tensor = self.table(buckets + layer * self.cfg.n_buckets if self.by_layer else buckets)
        return bias.permute(0, 3, 1, 2)  # (b, q, k, h) -> (b, h, q, k)
