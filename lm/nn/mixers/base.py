"""Token mixers, by which the tokens of a row read each other: attention and recurrences. The model's `pattern` chooses."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from lm.nn.activation_memory import Activations
from lm.nn.context import Context
from lm.nn.init import Declares, zeros
from lm.nn.norm import NormConfig
from lm.nn.position.base import Position, PositionConfig
from lm.ops.attention.attend import Preparing, Scoring, choose
from lm.ops.attention.blockwise import NATIVE
from lm.ops.attention.mask import Mask
from lm.ops.cache.cache import State
from lm.schema import MOST, Config, Slot, Tree


class Mixer(Declares, nn.Module):
    """One forward for training and for cached decoding: with `ctx.cache`, tokens continue from the cached state of layer `layer`."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    @abstractmethod
    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """(b, s, d) -> (b, s, d). Tokens see their own document, no padding, and what `ctx.mask` lets them."""


class Attention(Mixer):
    """A mixer that scores all pairs of tokens. Its backend is chosen when its weights move to a device, not in each forward."""

    initializers = {"sinks": zeros}
    o: nn.Linear

    def __init__(self, layer: int, head_dim: int, how: Scoring, n_sinks: int = 0) -> None:
        super().__init__(layer)
        self.head_dim, self.how, self.how_in_eval = head_dim, how, replace(how, dropout=0.0)
        self.sinks = nn.Parameter(torch.empty(n_sinks)) if n_sinks else None
        self.attend = choose(torch.get_default_device(), head_dim, how, n_sinks > 0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Overrides the method that every move to a device passes through, to choose the backend of that device."""
        moved = super()._apply(fn, recurse)
        self.attend = choose(self.o.weight.device, self.head_dim, self.how, self.sinks is not None)
        return moved

    def prepare(self, ctx: Context, rows: int) -> None:
        """Has the mask take the form that the backend reads, for a batch of so many rows."""
        if isinstance(self.attend, Preparing):
            self.attend.prepare(ctx.mask, self.bias(ctx.mask, ctx.position), self.how, rows)

    def weighted(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, position: Position | None) -> Tensor:
        """As `attended`, with the bias of this position."""
        return self.attended(q, k, v, mask, self.bias(mask, position))

    def attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None) -> Tensor:
        """As `Attend`; dropout acts in training only. Of shared rows, each rank computes some heads."""
        how, sinks = self.how if self.training else self.how_in_eval, None if self.sinks is None else mask.sharding.own_heads(self.sinks)
        q, k, v = mask.sharding.by_heads(q, k, v)
        return mask.sharding.by_tokens(self.attend(q, k, v, mask, bias, how, sinks))

    def bias(self, mask: Mask, position: Position | None) -> Tensor | None:
        """Returns the bias that this position adds to the scores, broadcastable to (b, h, q, k); None: there is none."""
        return None if position is None else self.bias_of(position, mask.q_positions, mask, "bias")

    def bias_of(self, position: Position, q_positions: Tensor, mask: Mask, key: Hashable) -> Tensor | None:
        """Returns the bias for queries at these positions; where layers share it, it is built once and kept in the mask by `key`."""
        if position.by_layer:
            return position.bias_of_layer(q_positions, mask.k_positions, self.layer)
        return mask.once(key, lambda: position.bias(q_positions, mask.k_positions))

    def joined(self, heads: Tensor) -> Tensor:
        """Joins the heads and projects them, (b, h, s, c) -> (b, s, d)."""
        out: Tensor = self.o(heads.transpose(1, 2).flatten(2))  # (b, h, s, c) -> (b, s, h*c)
        return out


class MixerConfig(Config):
    """What mixes the tokens of a layer."""

    sublayers: ClassVar[int] = 1
    """How many of a layer's additions to the residual stream are its own."""

    @abstractmethod
    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        """Returns the mixer of layer `layer`, counted from 0.  norm: the block's norm, for norms within the mixer."""

    def build_in(self, vocab_size: int, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        """As `build`, in a model of so many tokens, for kinds that look up tokens themselves (`ctx.tokens`)."""
        return self.build(norm, d_model, layer)

    @abstractmethod
    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        """Returns the FLOPs of one token in a full row, 2 per multiply-add, without those of linear layers (nn.Linear)."""

    @abstractmethod
    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Returns what autograd saves of one token for the backward, the input of the mixer aside."""

    def kernel_outputs(self, d_model: int, layer: int) -> Activations:
        """Returns the outputs of fused kernels for one token, which selective recomputation keeps; linear layers (nn.Linear) aside."""
        return Activations(0, 0)

    def saved_scores(self, seq_len: int, device: str) -> Activations:
        """Returns what autograd saves of one token and all of its row for the backward, where no fused kernel of this device (cpu, cuda,
        mps) computes it."""
        return Activations(0, 0)

    @abstractmethod
    def states(self, d_model: int, layer: int) -> tuple[State, ...]:
        """Returns what a cache keeps of a row, of each kind one at most."""

    @abstractmethod
    def why_not_context_parallel(self, n: int) -> str | None:
        """Returns why n ranks cannot hold a row in slices, with the remedy; None where they can."""

    def divided(self, d_model: int, n: int) -> Self:
        """Returns the config of one rank's share, where n ranks hold the mixer's matrices in slices."""
        raise AssertionError("its matrices are whole")

    def exchanged_activations(self, d_model: int, n: int) -> Activations:
        """Returns what autograd saves of one token in addition, where n ranks hold its row in slices."""
        return Activations(0, 0)


class SlotMixerConfig(MixerConfig):
    """What the kinds of both slots answer."""

    @abstractmethod
    def state(self, d_model: int, layer: int) -> State:
        """Returns the shapes of the tensors that a cache keeps of a row."""

    def states(self, d_model: int, layer: int) -> tuple[State, ...]:
        return (self.state(d_model, layer),)


def saved_weights(
    n_heads: int, seq_len: int, device: str, *, softcap: bool = False, dropout: bool = False, sinks: bool = False, learned: bool = False
) -> Activations:
    """Returns what autograd saves of one token's weights by the backend that `choose` gives.  learned: the scores have a bias with a
    gradient, which no fused kernel computes; so has that of sinks but on a CPU."""
    pairs = n_heads * seq_len
    if device == "mps" or (softcap and (device == "cpu" or dropout)):
        return Activations((1 + softcap + dropout) * pairs, pairs, seq_len)  # behind each step, as the values' dtype, and the mask
    if device == "cpu" and dropout:
        return Activations(3 * pairs, 0)
    if device == "cpu":  # `Blockwise` keeps the bias, and torch the weights in float32
        return Activations(0, pairs * learned) if NATIVE else Activations(pairs * learned, 0)
    return Activations(0, pairs * (sinks or learned))


class AttentionConfig(SlotMixerConfig, Slot, group="model/attention"):
    """How tokens read each other by scores of all pairs."""

    by_heads: ClassVar[bool] = False
    """All that tokens read of each other goes through `Attention.weighted`."""

    n_heads: int = Field(gt=0, le=MOST)
    """Number of query heads."""

    def saved_scores(self, seq_len: int, device: str) -> Activations:
        return saved_weights(self.n_heads, seq_len, device)

    def why_not_context_parallel(self, n: int) -> str | None:
        if not self.by_heads:
            return f"attention={self.kind} reads whole rows in one rank. Use attention=gqa"
        if self.n_heads % n:
            return f"model.attention.n_heads={self.n_heads} is not a multiple of it, and each rank attends with as many. Choose a divisor"
        return None

    def why_not_tensor_parallel(self, n: int) -> str | None:
        """Returns why n ranks cannot hold the matrices in slices, with the remedy; None where they can."""
        return f"attention={self.kind} has matrices that no rank can hold a slice of. Use attention=gqa"

    def in_layer(self, layer: int, layers: Sequence[int]) -> MixerConfig:
        """Returns the mixer of this layer, where these attend. Raises ValueError where it can have none."""
        return self

    def require_both_stacks(self, n_encoder_layers: int) -> None:
        """Raises ValueError where this kind has no cross-attention, or a layer of an encoder, in which all attend, can have no mixer."""
        if self.cross() is None:
            raise ValueError(f"attention={self.kind} has no form for cross-attention. Use attention=gqa in an encoder-decoder.")
        try:
            for layer in range(n_encoder_layers):
                self.in_layer(layer, range(n_encoder_layers))
        except ValueError as error:
            raise ValueError(f"in an encoder of {n_encoder_layers} layers, {error}") from None

    def rotary_width(self, d_model: int) -> int:
        """Returns how many dimensions of a head may rotate: all, where the heads together are as wide as the model."""
        return d_model // self.n_heads

    def windowed_width(self, d_model: int) -> int:
        """As rotary_width, in layers with a window."""
        return self.rotary_width(d_model)

    def whence(self, d_model: int) -> str:
        """Returns what has made a head as wide as it is, in brackets; "" where a key says its width."""
        return ""

    def score_width(self, d_model: int) -> int:
        """Returns how many products a score sums: the width of a head's query and key."""
        return self.rotary_width(d_model)

    def require(self, d_model: int, position: PositionConfig) -> None:
        """Raises ValueError where this width or this position does not fit: by itself, where the heads cannot be as wide as the model."""
        if d_model % self.n_heads:
            raise ValueError(f"d_model={d_model} is not a multiple of n_heads={self.n_heads}. Change one.")

    def require_layers(self, layers: Sequence[int], drafts: bool) -> None:
        """Raises ValueError where this kind does not fit the layers.  layers: those that attend; drafts: blocks beyond the last layer draft
        by themselves (MTP)."""

    def layer_window(self, layer: int) -> int | None:
        """Returns the window of this layer, None where it sees everything."""
        return None

    def cross(self) -> "AttentionConfig | None":
        """Returns the config of cross-attention to a source, of which every token is seen; None where this kind has no such form."""
        return None

    def build_cross(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        """Returns the cross-attention, which reads `ctx.memory`; called on the config that `cross` returned."""
        raise AssertionError(f"{self.kind} does not cross")

    def implied(self, d_model: int, layers: Sequence[int]) -> Tree:
        """Returns the meaning of options that differs from their value: what null stands for, and null for what acts in no layer.  layers:
        those that attend."""
        return {}


class RecurrentConfig(SlotMixerConfig, Slot, group="model/recurrent"):
    """How tokens read those before them by a state of fixed size that goes through the row; of use in causal stacks only."""

    def implied(self) -> Tree:
        """Returns the meaning of options that differs from their value, as what null stands for."""
        return {}

    def why_not_context_parallel(self, n: int) -> str | None:
        return f"recurrent={self.kind} takes a state through the whole row, token by token. Use attention in all layers"
