"""Multi-head, grouped-query and multi-query attention."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from lm.nn.context import Context
from lm.nn.linear import Out
from lm.nn.mixers.attend import Scoring, choose
from lm.nn.mixers.base import AttentionConfig
from lm.nn.mixers.cache import LayerShape
from lm.nn.mixers.mask import Mask
from lm.nn.norm import NormConfig


class GQAConfig(AttentionConfig):
    """Scaled dot-product attention; n_kv_heads = n_heads is multi-head, 1 is multi-query (Ainslie et al. 2023, arXiv:2305.13245)."""

    kind: Literal["gqa"] = "gqa"
    n_heads: int = Field(gt=0)
    """Number of query heads."""
    n_kv_heads: int | None = Field(None, gt=0)
    """Number of key and value heads; divides n_heads. null: n_heads."""
    head_dim: int | None = Field(None, gt=0)
    """Width of one head. null: d_model / n_heads."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections."""
    out_bias: bool = False
    """Bias on the output projection."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """Normalise queries and keys: per head (Qwen3) or over the full width (OLMo 2), before rotation."""
    window: int | None = Field(None, gt=0)
    """A token sees itself and the window-1 tokens before it. null: all."""
    global_every: int | None = Field(None, gt=0)
    """Every n-th layer ignores the window (layer n-1, 2n-1, ...). null: none does."""
    softcap: float | None = Field(None, gt=0)
    """Scores become softcap * tanh(score / softcap) (Gemma 2). null: off."""
    scale: float | None = Field(None, gt=0)
    """Factor on the scores. null: 1 / sqrt(head_dim)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an attention weight."""
    gpt_oss_sinks: bool = False
    """gpt-oss: a learned score per head that takes its part of each softmax and has no value."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            divisors = ", ".join(str(n) for n in range(1, self.n_heads + 1) if self.n_heads % n == 0)
            raise ValueError(f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}. Choose one of {divisors}.")
        if self.global_every is not None and self.window is None:
            raise ValueError(f"global_every={self.global_every} has no effect without a window. Set window, or drop global_every.")
        return self

    def width(self, d_model: int) -> int:
        """Width of one head."""
        return self.head_dim or d_model // self.n_heads

    def rotary_width(self, d_model: int) -> int:
        """Dimensions of a head that may rotate."""
        return self.width(d_model)

    def flops(self, d_model: int, keys: int) -> int:
        """Of scores and weighted values for one query, 2 per multiply-add."""
        return 4 * self.n_heads * self.width(d_model) * keys

    def layer_window(self, layer: int) -> int | None:
        """The window of this layer, None where it sees everything."""
        is_global = self.global_every is not None and (layer + 1) % self.global_every == 0
        return None if is_global else self.window

    def cache_shape(self, d_model: int, layer: int) -> LayerShape:
        """Keys and values of this layer, for `Cache`."""
        heads = (self.n_kv_heads or self.n_heads, self.width(d_model))
        return LayerShape((heads, heads), self.layer_window(layer))


class Scores:
    """A backend and how it scores; dropout acts in training only."""

    def __init__(self, how: Scoring) -> None:
        self.how, self.quiet = how, replace(how, dropout=0.0)

    def choose(self, device: torch.device, head_dim: int, sinks: bool) -> None:
        """The backend for this device."""
        self.attend, self.backend = choose(device, head_dim, self.how, sinks)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, sinks: Tensor | None, training: bool) -> Tensor:
        """As `Attend`."""
        return self.attend(q, k, v, mask, bias, self.how if training else self.quiet, sinks)


class GQA(nn.Module):
    """Project, norm, rotate, cache, attend, project. One body for training and for cached decoding."""

    def __init__(self, cfg: GQAConfig, norm: NormConfig, d_model: int, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = cfg.width(d_model)
        q_width, kv_width = cfg.n_heads * self.head_dim, (cfg.n_kv_heads or cfg.n_heads) * self.head_dim
        self.q = nn.Linear(d_model, q_width, bias=cfg.qkv_bias)
        self.k = nn.Linear(d_model, kv_width, bias=cfg.qkv_bias)
        self.v = nn.Linear(d_model, kv_width, bias=cfg.qkv_bias)
        self.o = Out(q_width, d_model, bias=cfg.out_bias)
        self.norm_full = cfg.qk_norm == "full"
        per_head = cfg.qk_norm == "head"
        self.q_norm = nn.Identity() if cfg.qk_norm == "none" else norm.build(self.head_dim if per_head else q_width)
        self.k_norm = nn.Identity() if cfg.qk_norm == "none" else norm.build(self.head_dim if per_head else kv_width)
        self.sinks = nn.Parameter(torch.empty(cfg.n_heads)) if cfg.gpt_oss_sinks else None
        self.scores = Scores(Scoring(cfg.scale or 1 / math.sqrt(self.head_dim), cfg.layer_window(layer), cfg.softcap, cfg.dropout))
        self.scores.choose(self.q.weight.device, self.head_dim, cfg.gpt_oss_sinks)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What every move to a device passes through: the backend is chosen there, and not in each forward."""
        moved = super()._apply(fn, recurse)
        self.scores.choose(self.q.weight.device, self.head_dim, self.sinks is not None)
        return moved

    def queries(self, x: Tensor) -> Tensor:
        """(b, s, d) -> (b, h, s, c)."""
        return self._heads(self.q(x), self.q_norm)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(b, s, d) -> twice (b, g, s, c)."""
        return self._heads(self.k(x), self.k_norm), self._heads(self.v(x), None)

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is not None and self.norm_full:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))  # (b, s, h*c) -> (b, s, h, c)
        if norm is not None and not self.norm_full:
            x = norm(x)
        return x.transpose(1, 2)  # (b, s, h, c) -> (b, h, s, c)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, (k, v) = self.queries(x), self.keys_values(x)
        q, k = ctx.position.rotate(q, k, ctx.angles, self.layer)
        if ctx.cache is not None:
            k, v = ctx.cache.append(self.layer, k, v)
        mask = ctx.keys(self.layer)
        bias = mask.once("bias", lambda: ctx.position.bias(mask.q_positions, mask.k_positions))
        out = self.scores(q, k, v, mask, bias, self.sinks, self.training)
        projected: Tensor = self.o(out.transpose(1, 2).flatten(2))  # (b, h, s, c) -> (b, s, h*c)
        return projected


class CrossAttention(GQA):
    """Queries from the decoder, keys and values from the encoder's output, with no positions.  Vaswani et al. 2017, section 3.2.3."""

    def __init__(self, cfg: GQAConfig, norm: NormConfig, d_model: int, layer: int) -> None:
        everything = cfg.replace(window=None, global_every=None)
        super().__init__(everything, norm, d_model, layer)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        assert ctx.memory_mask is not None
        k, v = ctx.memory_keys(self.layer, self.keys_values)
        out = self.scores(self.queries(x), k, v, ctx.memory_mask, None, self.sinks, self.training)
        projected: Tensor = self.o(out.transpose(1, 2).flatten(2))  # (b, h, s, c) -> (b, s, h*c)
        return projected
