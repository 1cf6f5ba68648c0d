"""Layers without a feed-forward."""

from typing import Literal

from torch import Tensor, nn

from lm.nn.activation_memory import Activations
from lm.nn.ffn.base import FFNConfig
from lm.nn.norm import Sublayer


class NoFFNConfig(FFNConfig):
    """A layer is its mixer alone, as in Mamba (Gu & Dao 2023, arXiv:2312.00752, section 3.4)."""

    sublayers = 0

    kind: Literal["none"] = "none"

    def build(self, d_model: int, layer: int) -> nn.Module:
        return nn.Identity()

    def connected(self, residual: nn.Module) -> nn.Module:
        return Past()

    def exchanged_activations(self, d_model: int, layer: int, n: int) -> Activations:
        return Activations(0, 0)

    def why_not_tensor_parallel(self, d_model: int, n: int) -> str | None:
        return None

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        return Activations(0, 0)


class Past(nn.Module):
    """The residual connection of a feed-forward that is not there: returns x as it is."""

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        return x
