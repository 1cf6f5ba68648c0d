"""The RG-LRU: one number of each channel, which decays at a rate set by the token, and to which the token adds its gated input.

De et al. 2024, arXiv:2402.19427, section 2.4; used in two of three layers of Griffin and RecurrentGemma.
"""

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.activation_memory import Activations
from lm.nn.context import Context
from lm.nn.init import Declares, InitContext, by_inputs, matrix, zeros
from lm.nn.linear import Linear, Out
from lm.nn.mixers.base import Mixer, RecurrentConfig
from lm.nn.norm import NormConfig
from lm.ops.cache.cache import Fixed
from lm.ops.precision import wide, without_autocast
from lm.ops.recurrence.channels import continued
from lm.ops.recurrence.convolve import convolved
from lm.schema import MOST

_SHARPNESS = 8  # the paper's c: the power of a channel's own decay where the gate is fully open


class RGLRUConfig(RecurrentConfig):
    """h = a h + sqrt(1 - a^2) i x; o(h * gelu(gate)), with a and i of each token and channel, and x through a short convolution."""

    kind: Literal["rg_lru"] = "rg_lru"
    width: int = Field(gt=0, le=MOST)
    """Channels, each with one number as its state (Griffin: 4/3 of d_model; RecurrentGemma: d_model)."""
    n_heads: int = Field(gt=0, le=MOST)
    """Groups of channels; what lets a channel fade and add is said by those of its group."""
    kernel: int = Field(4, gt=1, le=MOST)
    """Tokens that the convolution mixes before, itself included."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.width % self.n_heads:
            raise ValueError(f"n_heads={self.n_heads} does not divide width={self.width}. Choose a divisor.")
        return self

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return RGLRU(self, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        """Counts the convolution, both matrices of each group, the decay and the addition."""
        return self.width * (2 * self.kernel + 4 * self.width // self.n_heads + 4)

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Counts input gate, gated input, decay a, sqrt(1 - a^2), the products of a chunk and h; x, and the output gate three times."""
        return Activations(12 * self.width, 4 * self.width, 0, self.width)

    def state(self, d_model: int, layer: int) -> Fixed:
        """Returns the convolution's inputs of the last tokens, and h."""
        return Fixed(((self.kernel - 1, self.width), (self.width,)))


def fading(shape: torch.Size, init: InitContext) -> Tensor:
    """softplus^-1(-log(u) / c) of u between 0.9 and 0.999, the decay of a channel where its gate is fully open.  Section 2.4."""
    left = torch.empty(shape).uniform_(0.9, 0.999, generator=init.source)
    return torch.expm1(-left.log() / _SHARPNESS).log()


class ByHead(Declares, nn.Module):
    """A block-diagonal linear layer: W x + b of each group of channels by itself. The weight is (h, out, in), the bias (h, out)."""

    initializers = {"weight": matrix, "bias": zeros}

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, each = n_heads, width // n_heads
        self.width = width
        self.weight, self.bias = nn.Parameter(torch.empty(n_heads, each, each)), nn.Parameter(torch.empty(n_heads, each))

    def extra_repr(self) -> str:
        return f"{self.width} -> {self.width}, in {self.n_heads} groups"

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, w) -> (b, s, w)."""
        out = torch.einsum("bshi,hoi->bsho", x.unflatten(-1, (self.n_heads, -1)), self.weight)
        return (out + self.bias.to(out.dtype)).flatten(2)


class RGLRU(Mixer):
    """o(h * gelu(gate)). At position 0 h starts from 0, and the factor sqrt(1 - a^2) on the gated input is 1, as in the authors' code.

    The authors' code bounds the derivative of that root. Here it is the root of -expm1(2 log a), and log a is 0 only where it underflows.
    """

    initializers = {"kernel": by_inputs, "fade": fading}

    def __init__(self, cfg: RGLRUConfig, d_model: int, layer: int) -> None:
        super().__init__(layer)
        self.cfg = cfg
        self.gate, self.x = Linear(d_model, cfg.width), Linear(d_model, cfg.width)
        self.kernel = nn.Parameter(torch.empty(cfg.width, cfg.kernel))
        self.kernel_bias = nn.Parameter(torch.empty(cfg.width))
        self.rate, self.write = ByHead(cfg.width, cfg.n_heads), ByHead(cfg.width, cfg.n_heads)
        self.fade = nn.Parameter(torch.empty(cfg.width))
        self.o = Out(cfg.width, d_model)

    def extra_repr(self) -> str:
        return f"{self.cfg.width} channels, a convolution of {self.cfg.kernel} tokens"

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        ctx.mask.require_causal("recurrent=rg_lru")
        mixed, ends = convolved(self.x(x), self.kernel, ctx.mask, ctx.cache, self.layer)
        mixed = mixed + self.kernel_bias.to(mixed.dtype)
        rate, write = self.rate(mixed), self.write(mixed)
        with without_autocast(x.device):  # sums over a row are kept in float32
            fade, new = self.flow(mixed, rate, write, ctx.mask.q_positions.unsqueeze(-1))
            h = continued(fade, new, ends, ctx.cache, self.layer)
        out: Tensor = self.o(h.to(x.dtype) * F.gelu(self.gate(x), approximate="tanh"))
        return out

    def flow(self, x: Tensor, rate: Tensor, write: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the decay a of each token and the term that it adds to h, in float32 or wider, (b, s, w); padding leaves h as it is.
        at: positions, (b or 1, s, 1)."""
        log_a = -_SHARPNESS * F.softplus(wide(self.fade)) * wide(rate).sigmoid()
        log_a = torch.where(at > 0, log_a, torch.where(at == 0, float("-inf"), 0.0))
        root = torch.expm1(2 * log_a).clamp(max=-torch.finfo(log_a.dtype).tiny).neg().sqrt()  # a root of 0 has no derivative
        return log_a.exp(), torch.where(at < 0, 0.0, wide(x) * wide(write).sigmoid() * root)
