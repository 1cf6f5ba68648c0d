"""Mamba: a few numbers of each channel, which decay by a step that each token sets, and to which the token writes with the same step.

Gu & Dao 2023, arXiv:2312.00752; with norms within also in Falcon Mamba and Jamba. Mamba-2 is another mixer (lm/nn/mixers/mamba2.py).
"""

from collections.abc import Mapping
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.activation_memory import Activations
from lm.nn.context import Context
from lm.nn.init import Declares, InitContext, Initializer, by_inputs, ones
from lm.nn.linear import Linear, Out
from lm.nn.mixers.base import Mixer, RecurrentConfig
from lm.nn.mixers.scan import steps
from lm.nn.norm import BareRMSNorm, NormConfig, RMSNorm
from lm.ops.cache.cache import Fixed
from lm.ops.precision import wide, without_autocast
from lm.ops.recurrence.channels import continued
from lm.ops.recurrence.convolve import convolved
from lm.schema import MOST


class MambaConfig(RecurrentConfig):
    """h = exp(-dt A) h + dt u B; o((h C + D u) * silu(gate)), with dt, B and C of each token's u, x through a short convolution."""

    kind: Literal["mamba"] = "mamba"
    width: int = Field(gt=0, le=MOST)
    """Channels (Mamba: twice d_model)."""
    state_dim: int = Field(16, gt=0, le=MOST)
    """Numbers of a channel's state, and width of B and C."""
    rank: int = Field(gt=0, le=MOST)
    """Numbers that say the steps of all channels (Mamba: d_model / 16)."""
    kernel: int = Field(4, gt=1, le=MOST)
    """Tokens that the convolution mixes before, itself included."""
    kernel_bias: bool = True
    """Learn a bias of the convolution."""
    bias: bool = False
    """Learn biases of the projections in and out."""
    inner_eps: float | None = Field(None, ge=1e-30)
    """Norms with this beside the mean square, on B, C and what says the steps (Falcon Mamba, Jamba: 1e-6). null: no norms."""
    inner_weight: bool = False
    """These norms learn a factor on each number (Jamba)."""

    @model_validator(mode="after")
    def _norms_are_there(self) -> Self:
        if self.inner_weight and self.inner_eps is None:
            raise ValueError(
                "inner_weight=true is of norms, and inner_eps=null leaves them out. Set inner_eps=1e-6, or inner_weight=false."
            )
        return self

    def inner_norm(self, d: int) -> nn.Module:
        """Returns the norm on vectors of width d."""
        if self.inner_eps is None:
            return nn.Identity()
        return RMSNorm(d, self.inner_eps) if self.inner_weight else BareRMSNorm(d, self.inner_eps)

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return Mamba(self, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        """Counts the convolution, the decays, and writing to and reading from the state."""
        return 2 * self.width * (self.kernel + 3 * self.state_dim)

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Counts of each channel's state the decay, the products of a chunk, what a chunk begins with and h; of each channel what leads
        there and away."""
        said = self.rank + 2 * self.state_dim
        return Activations(self.width * (6 * self.state_dim + 6), 4 * self.width + said + (0 if self.inner_eps is None else said))

    def state(self, d_model: int, layer: int) -> Fixed:
        """Returns the convolution's inputs of the last tokens, and h."""
        return Fixed(((self.kernel - 1, self.width), (self.width * self.state_dim,)))


class Steps(Declares, Linear):
    """From a few numbers to the steps of all channels."""

    initializers = {"weight": by_inputs, "bias": steps}


class Mamba(Mixer):
    """o((h C + D u) * silu(gate)). At position 0 h starts from 0. `fade` holds the logarithms of A, of all channels one after another."""

    initializers = {"kernel": by_inputs, "skip": ones}

    def __init__(self, cfg: MambaConfig, d_model: int, layer: int) -> None:
        super().__init__(layer)
        self.cfg, n = cfg, cfg.state_dim
        self.gate, self.x = Linear(d_model, cfg.width, bias=cfg.bias), Linear(d_model, cfg.width, bias=cfg.bias)
        self.kernel = nn.Parameter(torch.empty(cfg.width, cfg.kernel))
        self.kernel_bias = nn.Parameter(torch.empty(cfg.width)) if cfg.kernel_bias else None
        self.select = Linear(cfg.width, cfg.rank + 2 * n, bias=False)
        self.norms = nn.ModuleList(map(cfg.inner_norm, (cfg.rank, n, n)))
        self.step = Steps(cfg.rank, cfg.width)
        self.fade, self.skip = nn.Parameter(torch.empty(cfg.width * n)), nn.Parameter(torch.empty(cfg.width))
        self.o = Out(cfg.width, d_model, bias=cfg.bias)

    def named_initializers(self) -> Mapping[str, Initializer]:
        return {**self.initializers, "fade": self._fading}

    def _fading(self, shape: torch.Size, init: InitContext) -> Tensor:
        """log 1, log 2, ..., log state_dim, of each channel.  Section 3.6, S4D-Real."""
        return torch.arange(1, self.cfg.state_dim + 1).float().log().repeat(self.cfg.width)

    def extra_repr(self) -> str:
        return f"{self.cfg.width} channels with states of {self.cfg.state_dim}, a convolution of {self.cfg.kernel} tokens"

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        ctx.mask.require_causal("recurrent=mamba")
        mixed, ends = convolved(self.x(x), self.kernel, ctx.mask, ctx.cache, self.layer)
        u = F.silu(mixed if self.kernel_bias is None else mixed + self.kernel_bias.to(mixed.dtype))
        parts = self.select(u).split([self.cfg.rank, self.cfg.state_dim, self.cfg.state_dim], dim=-1)
        step, write, read = (norm(part) for norm, part in zip(self.norms, parts, strict=True))
        rate = self.step(step)
        with without_autocast(x.device):  # sums over a row are kept in float32
            fade, new = self.flow(u, rate, write, ctx.mask.q_positions.unsqueeze(-1))
            h = continued(fade, new, ends, ctx.cache, self.layer)
            seen = (h.unflatten(-1, (self.cfg.width, -1)) @ wide(read).unsqueeze(-1)).squeeze(-1)  # (b, s, w*n) -> (b, s, w)
            out = (seen + wide(self.skip) * wide(u)).to(x.dtype)
        projected: Tensor = self.o(out * F.silu(self.gate(x)))
        return projected

    def flow(self, u: Tensor, rate: Tensor, write: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the decay of each token and the term that it adds to h, in float32 or wider, (b, s, w*n); padding leaves h as it is.
        at: positions, (b or 1, s, 1)."""
        dt = F.softplus(wide(rate))
        log_fade = -wide(self.fade).exp().view(self.cfg.width, -1) * dt.unsqueeze(-1)  # (b, s, w, n)
        kept = torch.where(at == 0, float("-inf"), 0.0).unsqueeze(-1)
        fade = torch.where((at > 0).unsqueeze(-1), log_fade, kept.to(dt.dtype)).exp()
        new = torch.where(at < 0, 0.0, dt * wide(u)).unsqueeze(-1) * wide(write).unsqueeze(-2)
        return fade.flatten(2), new.flatten(2)
