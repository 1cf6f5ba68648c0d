"""What lets the tokens of a row read each other: attention, and what goes through the row step by step. A layer's pattern chooses."""

from abc import abstractmethod

from pydantic import Field
from torch import Tensor, nn

from lm.nn.context import Context
from lm.nn.cost.kept import Kept
from lm.nn.init import Declares
from lm.nn.mixers.cache import State
from lm.nn.norm import NormConfig
from lm.nn.position.base import PositionConfig
from lm.schema import Config, Slot, Tree


class Mixer(Declares, nn.Module):
    """One body for training and for cached decoding: with `ctx.cache`, tokens go on from what layer `layer` of it holds."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    @abstractmethod
    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """(b, s, d) -> (b, s, d). Tokens see their own document, no padding, and what `ctx.mask` lets them."""


class MixerConfig(Config):
    """What the kinds of both slots answer."""

    @abstractmethod
    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        """Returns the mixer of layer `layer`, counted from 0.  norm: that of the block, for norms within."""

    @abstractmethod
    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        """Returns those of one token in a full row, 2 per multiply-add, beside those of its linear layers (nn.Linear)."""

    @abstractmethod
    def keeps(self, d_model: int, layer: int) -> Kept:
        """Returns what the backward needs of one token, the input of the mixer aside."""

    @abstractmethod
    def state(self, d_model: int, layer: int) -> State:
        """Returns what a cache keeps of a row."""


class AttentionConfig(MixerConfig, Slot, group="model/attention"):
    """How tokens read each other by scores of all pairs."""

    n_heads: int = Field(gt=0)
    """Number of query heads."""

    @abstractmethod
    def rotary_width(self, d_model: int) -> int:
        """Returns the dimensions of a head that may rotate."""

    def require(self, d_model: int, position: PositionConfig) -> None:
        """Raises ValueError where this width or this position does not fit."""

    def cross(self) -> "AttentionConfig | None":
        """Returns the same for reading another row, of which every token is seen; None where there is no such form."""
        return None

    def build_cross(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        """Returns what reads `ctx.memory`, of what `cross` returned."""
        raise AssertionError(f"{self.kind} does not cross")

    def implied(self, d_model: int, n_layers: int) -> Tree:
        """Returns the options that mean another value than they hold: what null stands for, and null for what no layer has."""
        return {}


class RecurrentConfig(MixerConfig, Slot, group="model/recurrent"):
    """How tokens read those before them by a state of fixed size that goes through the row; of use in causal stacks only."""
