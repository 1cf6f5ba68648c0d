"""A norm: dynamic tanh, which needs no statistics.  Zhu et al. 2025, arXiv:2503.10622.

lm train plugins=examples/plugins/dyt.py model/norm=dyt model.norm.alpha=0.8
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from lm.kinds import NormConfig


class DyTConfig(NormConfig):
    """weight * tanh(alpha * x) + bias."""

    kind: Literal["dyt"] = "dyt"
    alpha: float = Field(0.5, gt=0)
    """Slope at the start; the model learns a factor on it."""

    def build(self, d: int) -> nn.Module:
        return DyT(d, self.alpha)


class DyT(nn.Module):
    """weight * tanh(alpha * factor * x) + bias, with one factor for all dimensions; weight and factor start as 1, bias as 0."""

    def __init__(self, d: int, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.factor = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(d))
        self.bias = nn.Parameter(torch.empty(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(self.alpha * self.factor * x) + self.bias
