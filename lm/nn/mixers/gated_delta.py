"""The gated delta rule: a state that fades, and in which a key's old value is replaced by its new one.

Yang et al. 2024, arXiv:2412.06464; three of four layers of Qwen3-Next and of OLMo Hybrid mix so.
"""

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.cost.kept import Kept
from lm.nn.linear import Out
from lm.nn.mixers.base import Mixer, RecurrentConfig
from lm.nn.mixers.cache import Fixed
from lm.nn.mixers.recurrence import CHUNK, Flow
from lm.nn.mixers.scan import Scan, by_head, normed, wide
from lm.nn.norm import NormConfig
from lm.schema import MOST

_EPS = 1e-6  # added to the square of a query's or key's length


class GatedDeltaConfig(RecurrentConfig):
    """S = a S; S = S + b k (v - S^T k)^T; o(norm(S^T q) * silu(gate)), with a and b of each token and head, q and k of length 1."""

    kind: Literal["gated_delta"] = "gated_delta"
    n_heads: int = Field(gt=0, le=MOST)
    """Heads of values, each with a state of k_dim x v_dim."""
    n_k_heads: int | None = Field(None, gt=0, le=MOST)
    """Heads of queries and keys, each shared by as many heads of values; null: as many as those."""
    k_dim: int = Field(gt=0, le=MOST)
    """Width of a query's and key's head."""
    v_dim: int = Field(gt=0, le=MOST)
    """Width of a value's head."""
    kernel: int = Field(4, gt=1, le=MOST)
    """Tokens that a convolution mixes before, itself included."""
    negative: bool = False
    """b is up to 2 and not 1, so that a state may turn round (Grazzi et al. 2024, arXiv:2411.12537; OLMo Hybrid)."""
    eps: float = Field(1e-6, ge=1e-30)
    """Added to the mean square in the norm of what is read."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.n_heads % self.groups:
            raise ValueError(f"n_k_heads={self.n_k_heads} does not divide n_heads={self.n_heads}. Choose a divisor.")
        return self

    @property
    def groups(self) -> int:
        """Returns the heads of queries and keys."""
        return self.n_k_heads or self.n_heads

    @property
    def widths(self) -> tuple[int, int]:
        """Returns those of all queries, which is that of all keys, and of all values."""
        return self.groups * self.k_dim, self.n_heads * self.v_dim

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return GatedDelta(self, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        """The convolution, what is held of a key, what is written and what is read."""
        qk, v = self.widths
        return 2 * self.kernel * (2 * qk + v) + 6 * self.n_heads * self.k_dim * self.v_dim

    def keeps(self, d_model: int, layer: int) -> Kept:
        """Inputs of the convolution and of what follows it, both forms of q, k and v, the system and the scores of a chunk, and its part of
        a state."""
        qk, v = self.widths
        state = self.n_heads * self.k_dim * self.v_dim // CHUNK
        chunk = self.n_heads * (5 * CHUNK + 5 * self.k_dim + 4 * self.v_dim)
        return Kept(chunk + 2 * state + 2 * qk + 2 * v, 3 * (2 * qk + v) + 3 * v)

    def state(self, d_model: int, layer: int) -> Fixed:
        """What was convolved of the last tokens, and the matrices."""
        qk, v = self.widths
        return Fixed(((self.kernel - 1, 2 * qk + v), (self.n_heads, self.k_dim, self.v_dim)))


class GatedDelta(Scan):
    """q, k and v from one projection and one convolution; decay, b and gate from the input itself."""

    kind: ClassVar[str] = "gated_delta"

    def __init__(self, cfg: GatedDeltaConfig, d_model: int, layer: int) -> None:
        qk, v = cfg.widths
        super().__init__(layer, 2 * qk + v, cfg.kernel, False, cfg.n_heads)
        self.cfg = cfg
        self.qkv = nn.Linear(d_model, 2 * qk + v, bias=False)
        self.gate = nn.Linear(d_model, v, bias=False)
        self.rate = nn.Linear(d_model, cfg.n_heads, bias=False)
        self.beta = nn.Linear(d_model, cfg.n_heads, bias=False)
        self.norm = nn.Parameter(torch.empty(cfg.v_dim))
        self.o = Out(v, d_model, bias=False)

    def extra_repr(self) -> str:
        return f"{self.cfg.n_heads} heads, states of {self.cfg.k_dim} x {self.cfg.v_dim}"

    def inputs(self, x: Tensor) -> Tensor:
        out: Tensor = self.qkv(x)
        return out

    def rates(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.rate(x), self.beta(x)

    def flow(self, u: Tensor, rates: tuple[Tensor, ...]) -> Flow:
        cfg, (qk, v) = self.cfg, self.cfg.widths
        queries, keys, values = u.split([qk, qk, v], dim=-1)
        q, k = (_unit(by_head(each, cfg.groups, cfg.n_heads // cfg.groups)) for each in (queries, keys))
        rate, beta = rates
        _, decay = self.faded(rate)
        beta = wide(beta).sigmoid().transpose(1, 2) * (2 if cfg.negative else 1)
        return Flow(q * cfg.k_dim**-0.5, k, by_head(values, cfg.n_heads), decay, beta)

    def output(self, x: Tensor, heads: Tensor, flow: Flow) -> Tensor:
        gate = F.silu(wide(self.gate(x))).unflatten(-1, heads.shape[2:])
        out: Tensor = self.o((wide(normed(heads, self.norm, self.cfg.eps)) * gate).to(x.dtype).flatten(2))
        return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
