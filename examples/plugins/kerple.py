"""A position: scores fall with the logarithm of the distance, as each head learns it.  Chi et al. 2022, arXiv:2205.09921.

lm train plugins=examples/plugins/kerple.py model/position=kerple
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lm.kinds import Activations, Dims, Position, PositionConfig


class KerpleConfig(PositionConfig):
    """bias = -strength[head] * log(1 + rate[head] * |query - key|), both positive."""

    kind: Literal["kerple"] = "kerple"
    acts: ClassVar[Literal["embed", "rotate", "bias"]] = "bias"
    scale: float = Field(1.0, gt=0)
    """Factor on all strengths."""

    def build(self, dims: Dims) -> Position:
        return Kerple(dims.n_heads, self.scale)

    def saved_activations(self, n_heads: int, seq_len: int) -> Activations:
        """The bias, its distances times the rates, and the logarithm: of each head and key."""
        return Activations(0, 3 * n_heads * seq_len)


class Kerple(Position):
    """The parameters are positive through softplus, and shared by all layers."""

    def __init__(self, n_heads: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.strength = nn.Parameter(torch.empty(n_heads))
        self.rate = nn.Parameter(torch.empty(n_heads))

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        distance = (q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)).abs().unsqueeze(1)  # (b, 1, q, k)
        strength, rate = (F.softplus(each)[:, None, None] for each in (self.strength, self.rate))  # (h,) -> (h, 1, 1)
        return -self.scale * strength * torch.log1p(rate * distance)  # (b, h, q, k)
