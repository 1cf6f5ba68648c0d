"""A gated convolution over the last few tokens, the mixer of most layers of LFM2.  Liquid AI 2025, arXiv:2511.23404."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from lm.nn.activation_memory import Activations
from lm.nn.context import Context
from lm.nn.init import by_inputs
from lm.nn.linear import Linear, Out
from lm.nn.mixers.base import Mixer, RecurrentConfig
from lm.nn.norm import NormConfig
from lm.ops.cache.cache import Fixed
from lm.ops.recurrence.convolve import convolved
from lm.schema import MOST


class ShortConvConfig(RecurrentConfig):
    """Each channel mixes its last few tokens: o(c * conv(b * v)), where b, c and v are projections of the input."""

    kind: Literal["short_conv"] = "short_conv"
    kernel: int = Field(3, gt=1, le=MOST)
    """Tokens that a token sees, itself included (LFM2: 3)."""

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return ShortConv(self, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        return 2 * self.kernel * d_model

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Counts the three projections, the convolution's input, its output, and its output times c."""
        return Activations(0, 6 * d_model)

    def state(self, d_model: int, layer: int) -> Fixed:
        """Returns the convolution's inputs of the last tokens."""
        return Fixed(((self.kernel - 1, d_model),))


class ShortConv(Mixer):
    """o(c * conv(b * v)), with a kernel of its own for each channel."""

    initializers = {"kernel": by_inputs}

    def __init__(self, cfg: ShortConvConfig, d_model: int, layer: int) -> None:
        super().__init__(layer)
        self.bcv = Linear(d_model, 3 * d_model, bias=False)
        self.n_tokens = cfg.kernel
        self.kernel = nn.Parameter(torch.empty(d_model, cfg.kernel))
        self.o = Out(d_model, d_model, bias=False)

    def extra_repr(self) -> str:
        return f"of {self.n_tokens} tokens"

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        ctx.mask.require_causal("recurrent=short_conv")
        b, c, v = self.bcv(x).chunk(3, dim=-1)  # (b, s, 3d) -> (b, s, d) each
        mixed, after = convolved(b * v, self.kernel, ctx.mask, ctx.cache, self.layer)
        if ctx.cache is not None:
            ctx.cache.advance(self.layer, after)
        out: Tensor = self.o(c * mixed)
        return out
