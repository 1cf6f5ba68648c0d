"""Heads of q, k and v from one projection and one convolution, for the kinds that differ only in how tokens update the state."""

from collections.abc import Callable
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.linear import Linear, Out
from lm.nn.mixers.base import RecurrentConfig
from lm.nn.mixers.scan import Scan
from lm.ops.cache.cache import Fixed
from lm.ops.norm import rms_norm_of_groups
from lm.ops.precision import wide
from lm.ops.recurrence.matrix import Flow, by_head
from lm.schema import MOST, Tree


class HeadsConfig(RecurrentConfig):
    """What kinds have in common whose heads of q, k and v come of one projection and one convolution."""

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
    eps: float = Field(1e-6, ge=1e-30)
    """Added to the mean square in the norm of what is read."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.n_heads % self.groups:
            raise ValueError(f"n_k_heads={self.n_k_heads} does not divide n_heads={self.n_heads}. Choose a divisor.")
        return self

    @property
    def groups(self) -> int:
        """Returns the number of query and key heads."""
        return self.n_k_heads or self.n_heads

    @property
    def widths(self) -> tuple[int, int]:
        """Returns the width of all queries, the same as that of all keys, and the width of all values."""
        return self.groups * self.k_dim, self.n_heads * self.v_dim

    def implied(self) -> Tree:
        return {"n_k_heads": self.groups}

    def state(self, d_model: int, layer: int) -> Fixed:
        """Returns the convolution's inputs of the last tokens, and the state matrix of each head."""
        qk, v = self.widths
        return Fixed(((self.kernel - 1, 2 * qk + v), (self.n_heads, self.k_dim, self.v_dim)))


class Heads(Scan):
    """o(norm(S^T q) * squash(gate)), with q, k and v from a short convolution."""

    squash: Callable[[Tensor], Tensor]

    def __init__(self, cfg: HeadsConfig, d_model: int, layer: int) -> None:
        qk, v = cfg.widths
        super().__init__(layer, 2 * qk + v, cfg.kernel, False)
        self.heads, self.squash = cfg, F.silu
        self.qkv = Linear(d_model, 2 * qk + v, bias=False)
        self.gate: nn.Module = Linear(d_model, v, bias=False)
        self.norm = nn.Parameter(torch.empty(cfg.v_dim))
        self.o = Out(v, d_model, bias=False)

    def extra_repr(self) -> str:
        return f"{self.heads.n_heads} heads, states of {self.heads.k_dim} x {self.heads.v_dim}"

    def inputs(self, x: Tensor) -> Tensor:
        out: Tensor = self.qkv(x)
        return out

    def split(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b, s, 2 qk + v) -> q and k, (b, h, s, k) each, and v, (b, h, s, v)."""
        cfg, (qk, v) = self.heads, self.heads.widths
        queries, keys, values = u.split([qk, qk, v], dim=-1)
        q, k = (by_head(each, cfg.groups, cfg.n_heads // cfg.groups) for each in (queries, keys))
        return q, k, by_head(values, cfg.n_heads)

    def output(self, x: Tensor, heads: Tensor, flow: Flow) -> Tensor:
        gate = self.squash(wide(self.gate(x))).unflatten(-1, heads.shape[2:])
        out: Tensor = self.o((wide(rms_norm_of_groups(heads, self.norm, self.heads.eps)) * gate).to(x.dtype).flatten(2))
        return out


def low_rank(d_in: int, rank: int, d_out: int, bias: bool = False) -> nn.Module:
    """Returns a linear map of this rank, as a product of two matrices."""
    return nn.Sequential(Linear(d_in, rank, bias=False), Linear(rank, d_out, bias=bias))
