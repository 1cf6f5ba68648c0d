"""Position: hooks with identity defaults. A kind overrides what it needs; positions always come as a tensor."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from lm.nn.activation_memory import Activations
from lm.nn.init import Declares
from lm.ops.attention.mask import arange_positions
from lm.schema import Slot, Tree

Angles = tuple[Tensor, ...]
"""cos and sin; behind them those of layers with a window, where these are others."""


@dataclass(frozen=True)
class Dims:
    """What a position kind may need to know of its stack. `rotary`: dimensions of a head that may rotate, and `windowed` in layers with a
    window (None: as many); `window`: that of each layer; `n_layers`: of this stack."""

    d_model: int
    n_heads: int
    rotary: int
    max_seq_len: int
    causal: bool
    window: Callable[[int], int | None] = lambda layer: None
    n_layers: int = 1
    windowed: int | None = None


class PositionConfig(Slot, group="model/position"):
    """How a model knows the order of its tokens."""

    acts: ClassVar[Literal["embed", "rotate", "bias"]] = "embed"
    """Where: on the embedding, or in attention on queries and keys, or on scores."""
    by_place: ClassVar[bool] = False
    """There are weights for every place of a row, so that no other model's rows may be longer or shorter."""

    @abstractmethod
    def build(self, dims: Dims) -> "Position":
        """Returns the hooks for one stack."""

    def require(self, rotary: int, whence: str = "") -> None:
        """Raises ValueError where this kind does not fit heads with `rotary` dimensions that may rotate.  whence: what made it so many."""

    def require_windowed(self, rotary: int, whence: str = "") -> None:
        """As `require`, of the heads of layers with a window."""
        self.require(rotary, whence)

    def rotates_all(self) -> bool:
        """Returns whether there is rotation, and in all layers."""
        return self.acts == "rotate"

    def require_layers(self, drafts: bool) -> None:
        """Raises ValueError where this kind does not fit the layers.  drafts: there are blocks beyond the last one."""

    def saved_activations(self, n_heads: int, seq_len: int) -> Activations:
        """Returns what autograd saves of one token in each layer that attends."""
        return Activations(0, 0)

    def implied(self, n_layers: int, windows: bool) -> Tree:
        """Returns null for the options that act in no layer.  windows: some layer has a window."""
        return {}

    def why_not_context_parallel(self) -> str | None:
        """Returns why ranks cannot hold a row in slices, with the remedy; None where a token needs its own position only."""
        if self.acts != "bias":
            return None
        return f"position={self.kind} is a bias on all pairs of a row, of all heads. Use position=rope"


class Position(Declares, nn.Module):
    """No position information; the base of every kind.  positions: (b, s) int64, -1 on padding."""

    by_layer = False  # `bias_of_layer` differs between layers

    def places(self, s: int, device: torch.device, start: int = 0) -> Tensor:
        """Returns start .. start + s - 1 as (1, s), for tokens without given positions. Raises ConfigError beyond the last one there is."""
        return arange_positions(s, device, start)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Returns embedded tokens, (b, s, d), with their positions added."""
        return x

    def angles(self, positions: Tensor) -> Angles | None:
        """Returns the cos and sin that `rotate` needs, computed once a forward instead of once a layer; None without rotation."""
        return None

    def rotates(self, layer: int) -> bool:
        """Returns whether `rotate` changes anything in this layer."""
        return type(self).rotate is not Position.rotate

    def rotate(self, x: Tensor, angles: Angles | None, layer: int) -> Tensor:
        """Returns queries, or keys before they are cached, rotated, (b, h, s, c)."""
        return x

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """Returns a bias on the scores of every layer, broadcastable to (b, h, q, k); None: there is none."""
        return None

    def bias_of_layer(self, q_positions: Tensor, k_positions: Tensor, layer: int) -> Tensor | None:
        """Returns the bias on the scores of this layer, as `bias`, which it is unless a kind has one for each layer (`by_layer`)."""
        return self.bias(q_positions, k_positions)
