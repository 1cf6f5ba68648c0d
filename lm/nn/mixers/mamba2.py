"""Mamba-2: a matrix state of each head that decays by a step dt of each token, and to which the token writes with the same step.

Dao & Gu 2024, arXiv:2405.21060; with attention in a few layers also in Granite 4, Bamba, Zamba2 and Nemotron-H.
"""

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.activation_memory import Activations
from lm.nn.init import ones
from lm.nn.linear import Linear, Out
from lm.nn.mixers.base import Mixer, RecurrentConfig
from lm.nn.mixers.scan import Scan
from lm.nn.norm import NormConfig
from lm.ops.cache.cache import Fixed
from lm.ops.norm import rms_norm_of_groups
from lm.ops.precision import wide
from lm.ops.recurrence.matrix import CHUNK, Flow, by_head
from lm.schema import MOST, Tree


class Mamba2Config(RecurrentConfig):
    """S = exp(-dt A) S + dt B x^T; o(norm((S^T C + D x) * silu(gate))), with dt, B, C and x of each token."""

    kind: Literal["mamba2"] = "mamba2"
    n_heads: int = Field(gt=0, le=MOST)
    """Heads, each with a state of state_dim x head_dim."""
    head_dim: int = Field(64, gt=0, le=MOST)
    """Width of a head of x."""
    state_dim: int = Field(128, gt=0, le=MOST)
    """Width of B and C."""
    groups: int = Field(1, gt=0, le=MOST)
    """Heads of B and C, each shared by as many heads of x; the last norm has as many groups."""
    kernel: int = Field(4, gt=1, le=MOST)
    """Tokens that a convolution mixes before, itself included."""
    kernel_bias: bool = True
    """Learn a bias of the convolution."""
    bias: bool = False
    """Learn biases of the projections in and out."""
    eps: float = Field(1e-6, ge=1e-30)
    """Added to the mean square in the last norm."""
    gated_norm: bool = True
    """The norm before the last matrix; false leaves its gate alone (Falcon-H1)."""
    input_scales: list[float] | None = None
    """Factors on the projections to the gate, x, B, C and dt (Falcon-H1). null: there are none."""
    step_floor: float = Field(0.0, ge=0)
    """Steps dt are this or more (Nemotron-H in transformers: 0.001)."""

    @model_validator(mode="after")
    def _numbers_fit(self) -> Self:
        if self.n_heads % self.groups:
            raise ValueError(f"groups={self.groups} does not divide n_heads={self.n_heads}. Choose a divisor.")
        if self.input_scales is not None and len(self.input_scales) != 5:
            raise ValueError(f"input_scales={self.input_scales} are of five projections: gate, x, B, C and dt. Give a number for each.")
        return self

    @property
    def widths(self) -> tuple[int, int]:
        """Returns the width of all heads of x, and the width of all heads of B, the same as that of C."""
        return self.n_heads * self.head_dim, self.groups * self.state_dim

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return Mamba2(self, d_model, layer)

    def implied(self) -> Tree:
        return {} if self.gated_norm else {"eps": None}

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        """Counts the convolution, and writing to and reading from the state."""
        x, b = self.widths
        return 2 * self.kernel * (x + 2 * b) + 4 * x * self.state_dim

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Counts inputs of the convolution and of the operations behind it, B, C and x by head, the scores of a chunk, and a token's
        share of a chunk's state."""
        x, b = self.widths
        chunk = self.n_heads * (3 * CHUNK + 4 * self.state_dim + 2 * self.head_dim)
        return Activations(chunk + 2 * x * self.state_dim // CHUNK + 3 * x, 3 * (x + 2 * b) + 2 * x)

    def state(self, d_model: int, layer: int) -> Fixed:
        """Returns the convolution's inputs of the last tokens, and the state matrix of each head."""
        x, b = self.widths
        return Fixed(((self.kernel - 1, x + 2 * b), (self.n_heads, self.state_dim, self.head_dim)))


class Mamba2(Scan):
    """x, B and C come from one projection and one convolution; dt and gate from the layer's input."""

    kind = "mamba2"
    initializers = {**Scan.initializers, "skip": ones}

    def __init__(self, cfg: Mamba2Config, d_model: int, layer: int) -> None:
        x, b = cfg.widths
        super().__init__(layer, x + 2 * b, cfg.kernel, cfg.kernel_bias)
        self.cfg = cfg
        self.gate = Linear(d_model, x, bias=cfg.bias)
        self.xbc = Linear(d_model, x + 2 * b, bias=cfg.bias)
        self.rate = Linear(d_model, cfg.n_heads, bias=cfg.bias)
        self.fade, self.step = nn.Parameter(torch.empty(cfg.n_heads)), nn.Parameter(torch.empty(cfg.n_heads))
        self.skip = nn.Parameter(torch.empty(cfg.n_heads))
        self.norm = nn.Parameter(torch.empty(x)) if cfg.gated_norm else None
        self.scales = cfg.input_scales or [1.0] * 5
        self.o = Out(x, d_model, bias=cfg.bias)

    def extra_repr(self) -> str:
        return f"{self.cfg.n_heads} heads, states of {self.cfg.state_dim} x {self.cfg.head_dim}"

    def inputs(self, x: Tensor) -> Tensor:
        out: Tensor = self.xbc(x)
        if self.cfg.input_scales is None:
            return out
        width, b = self.cfg.widths
        return torch.cat([part * scale for part, scale in zip(out.split([width, b, b], -1), self.scales[1:4], strict=True)], -1)

    def rates(self, x: Tensor) -> tuple[Tensor, ...]:
        return (_scaled(self.rate(x), self.scales[4]),)

    def flow(self, u: Tensor, rates: tuple[Tensor, ...]) -> Flow:
        cfg, (width, b) = self.cfg, self.cfg.widths
        values, keys, queries = u.split([width, b, b], dim=-1)
        dt, decay = self.faded(rates[0], cfg.step_floor)
        q, k = (by_head(each, cfg.groups, cfg.n_heads // cfg.groups) for each in (queries, keys))
        return Flow(q, k * dt, by_head(values, cfg.n_heads), decay)

    def output(self, x: Tensor, heads: Tensor, flow: Flow) -> Tensor:
        skipped = wide(heads) + flow.v.transpose(1, 2) * wide(self.skip).unsqueeze(-1)  # (b, s, h, v)
        gated = skipped.flatten(2) * F.silu(_scaled(wide(self.gate(x)), self.scales[0]))
        if self.norm is not None:
            gated = rms_norm_of_groups(gated.unflatten(-1, (self.cfg.groups, -1)), self.norm, self.cfg.eps).flatten(2)
        out: Tensor = self.o(gated.to(x.dtype))
        return out


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale
