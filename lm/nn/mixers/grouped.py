"""Attention in which heads of queries share heads of keys and values, and which may look through a window: options, and the module."""

import math
from collections.abc import Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from lm.nn.activation_memory import Activations
from lm.nn.context import Context
from lm.nn.linear import Linear, Out
from lm.nn.mixers.base import Attention, AttentionConfig, saved_weights
from lm.nn.norm import NormConfig, build_within, require_within
from lm.nn.position.base import PositionConfig
from lm.nn.spacing import evenly, is_there, require_place
from lm.ops.attention.attend import Scoring
from lm.ops.cache.cache import PerToken
from lm.ops.ranks.tensor_parallel import Divisible
from lm.ops.ranks.ulysses import repeats
from lm.schema import MOST, Config, Tree


class QueryGrowth(Config):
    """Queries are multiplied by 1 + rate ln(1 + floor(position / every)), so that long rows do not blur what they read (Llama 4, Ministral
    3)."""

    rate: float = Field(gt=0)
    """How fast they grow (Ministral 3: 0.1)."""
    every: int = Field(gt=0, le=MOST)
    """Positions between two steps; before the first, nothing grows (Ministral 3: the context of pretraining)."""
    first: int = Field(0, ge=0, le=MOST)
    """Position that the first token of a document counts as (Llama 4: 1)."""
    unrotated: bool = False
    """Only in layers that do not rotate (Llama 4)."""

    def require(self, position: PositionConfig) -> None:
        """Raises ValueError where no layer is left in which queries grow."""
        if self.unrotated and position.rotates_all():
            raise ValueError("query_growth.unrotated=true leaves out layers that rotate, and all do. Set position.none_every, or drop it.")

    def grown(self, q: Tensor, ctx: Context, layer: int) -> Tensor:
        """(b, h, s, c) -> (b, h, s, c): the queries of this layer times the factors of their positions, which are float32."""
        if self.unrotated and ctx.position.rotates(layer):
            return q
        positions = ctx.mask.sharding.for_sublayer(ctx.mask.q_positions)
        steps = torch.floor((positions.clamp_min(0) + self.first) / self.every)
        return q * (1 + self.rate * torch.log(1 + steps))[:, None, :, None].to(q.dtype)  # (b, s) -> (b, 1, s, 1)


class GroupedConfig(AttentionConfig):
    """What such kinds are configured by."""

    by_heads = True

    n_kv_heads: int | None = Field(None, gt=0, le=MOST)
    """Number of key and value heads; divides n_heads. null: n_heads."""
    head_dim: int | None = Field(None, gt=0, le=MOST)
    """Width of one head. null: d_model / n_heads."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections."""
    out_bias: bool = False
    """Bias on the output projection."""
    qk_norm: Literal["none", "head", "full", "rotated", "l2"] = "none"
    """Normalise queries and keys: per head (Qwen3) or over the full width (OLMo 2), before rotation; or per head behind it, rotated as
    norm (HunYuan), l2 without a weight and only in layers that rotate (Llama 4)."""
    window: int | None = Field(None, gt=0)
    """A token sees itself and the window-1 tokens before it. null: all."""
    chunked: bool = False
    """A token sees its own chunk instead: documents are cut into chunks of `window` tokens (Llama 4)."""
    global_every: int | None = Field(None, gt=0)
    """Every n-th layer ignores the window (layer n-1, 2n-1, ...). null: none does."""
    global_at: int | None = Field(None, ge=0)
    """Which of every n layers that is, counted from 0 (ModernBERT: 0). null: the last."""
    softcap: float | None = Field(None, gt=0)
    """Scores become softcap * tanh(score / softcap) (Gemma 2). null: off."""
    scale: float | None = Field(None, gt=0)
    """Factor on the scores. null: 1 / sqrt(head_dim)."""
    out_gate: Literal["none", "head", "element"] = "none"
    """What is read is multiplied by the sigmoid of a projection of the layer's input: a number per head, or one per element (Qwen3-Next;
    Qiu et al. 2025, arXiv:2505.06708)."""
    inner_norm: NormConfig | None = None
    """A norm of what the output projection reads, over all heads (Magneto, arXiv:2210.06423: layer; BitNet b1.58: rms). null: none."""
    gpt_oss_sinks: bool = False
    """gpt-oss: a learned score per head that takes its part of each softmax and has no value."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        require_within(inner_norm=self.inner_norm)
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            divisors = ", ".join(str(n) for n in range(1, self.n_heads + 1) if self.n_heads % n == 0)
            raise ValueError(f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}. Make that one of {divisors}, say.")
        if self.chunked and self.window is None:
            raise ValueError("chunked=true cuts documents into chunks of window tokens, and window is null. Set window, or drop chunked.")
        if self.global_every is not None and self.window is None:
            raise ValueError(f"global_every={self.global_every} has no effect without a window. Set window, or drop global_every.")
        require_place("global_every", self.global_every, "global_at", self.global_at)
        return self

    @property
    def kv_heads(self) -> int:
        """Returns the number of key and value heads."""
        return self.n_kv_heads or self.n_heads

    def width(self, d_model: int) -> int:
        """Width of one head."""
        return self.head_dim or d_model // self.n_heads

    def kv_width(self, d_model: int) -> int:
        """Returns the width of the keys of all heads, the same as that of all values."""
        return self.kv_heads * self.width(d_model)

    def gate_width(self, d_model: int) -> int:
        """Returns how many numbers of a token gate its attention output; 0 without a gate."""
        return {"none": 0, "head": self.n_heads, "element": self.n_heads * self.width(d_model)}[self.out_gate]

    def rotary_width(self, d_model: int) -> int:
        return self.width(d_model)

    def whence(self, d_model: int) -> str:
        return f" (d_model={d_model} / n_heads={self.n_heads})" if self.head_dim is None else ""

    def require(self, d_model: int, position: PositionConfig) -> None:
        if self.head_dim is None and d_model % self.n_heads:
            raise ValueError(f"d_model={d_model} is not a multiple of n_heads={self.n_heads}. Change one, or set head_dim.")

    def layer_window(self, layer: int) -> int | None:
        return None if is_there(layer, self.global_every, self.global_at) else self.window

    def scoring(self, d_model: int, layer: int) -> Scoring:
        """Returns how scores become weights in this layer."""
        window = self.layer_window(layer)
        chunked = self.chunked and window is not None
        return Scoring(self.scale or 1 / math.sqrt(self.width(d_model)), window, self.softcap, chunked=chunked)

    def saved_scores(self, seq_len: int, device: str) -> Activations:
        return saved_weights(self.n_heads, seq_len, device, softcap=self.softcap is not None, sinks=self.gpt_oss_sinks)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        """Counts scores and weighted values."""
        return 4 * self.n_heads * self.width(d_model) * min(seq_len, self.layer_window(layer) or seq_len)

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Counts q, k, v and the attention output; q and k before their norm; the gate before and after its sigmoid, and its product; what
        inner_norm gives. A compiler keeps no sigmoid, and the attention output twice, once as the last matrix reads it."""
        q, kv, gate = self.n_heads * self.width(d_model), self.kv_width(d_model), self.gate_width(d_model)
        normed, gated = q + kv if self.qk_norm != "none" else 0, q + 2 * gate if gate else 0
        inner = 0 if self.inner_norm is None else q
        return Activations(0, 2 * q + 2 * kv + normed + gated + inner, 0, 2 * d_model, recomputed=gate - q + inner)

    def kernel_outputs(self, d_model: int, layer: int) -> Activations:
        """Counts the attention output, and a logsumexp of each head."""
        return Activations(self.n_heads, self.n_heads * self.width(d_model))

    def exchanged_activations(self, d_model: int, n: int) -> Activations:
        """Counts the attention output once more, on the other side of the exchange back to tokens; and copies of keys and values."""
        copies = repeats(self.kv_heads, n) - 1
        return Activations(0, self.n_heads * self.width(d_model) + 2 * copies * self.kv_width(d_model))

    def state(self, d_model: int, layer: int) -> PerToken:
        """Returns one tensor of a token: its heads of keys, and behind these its heads of values."""
        return PerToken(((2 * self.kv_heads, self.width(d_model)),), self.layer_window(layer))

    def implied(self, d_model: int, layers: Sequence[int]) -> Tree:
        width, whole = self.width(d_model), {layer: self.layer_window(layer) is None for layer in layers}
        every, at = evenly(whole) or (None, None)
        seen_whole = whole.values()
        return {
            "n_kv_heads": self.kv_heads,
            "head_dim": width,
            "scale": self.scale or width**-0.5,
            "window": None if all(seen_whole) else self.window,
            "chunked": self.chunked and not all(seen_whole),
            "global_every": None if all(seen_whole) else every,
            "global_at": at,
        }


class GQA(Attention, Divisible):
    """Project, norm, rotate, cache, attend, project."""

    cut = {**Divisible.cut_by(("q", "k", "v", "gate"), "o"), "sinks": 0}

    def __init__(self, cfg: GroupedConfig, norm: NormConfig, d_model: int, layer: int) -> None:
        head_dim = cfg.width(d_model)
        super().__init__(layer, head_dim, cfg.scoring(d_model, layer), cfg.n_heads if cfg.gpt_oss_sinks else 0)
        q_width, kv_width = cfg.n_heads * head_dim, cfg.kv_width(d_model)
        self.q = Linear(d_model, q_width, bias=cfg.qkv_bias)
        self.k = Linear(d_model, kv_width, bias=cfg.qkv_bias)
        self.v = Linear(d_model, kv_width, bias=cfg.qkv_bias)
        self.o = Out(q_width, d_model, bias=cfg.out_bias)
        self.gate = Linear(d_model, cfg.gate_width(d_model), bias=cfg.qkv_bias) if cfg.out_gate != "none" else None
        self.inner_norm = build_within(cfg.inner_norm, q_width)
        self.norm_full = cfg.qk_norm == "full"
        self.q_norm, self.k_norm = (
            nn.Identity() if cfg.qk_norm in ("none", "l2") else norm.build(width if self.norm_full else head_dim)
            for width in (q_width, kv_width)
        )

    def extra_repr(self) -> str:
        heads, groups = (linear.out_features // self.head_dim for linear in (self.q, self.k))
        window = f", {'chunks of' if self.how.chunked else 'window'} {self.how.window}" if self.how.window else ""
        return f"{heads} heads of {self.head_dim}, {groups} key-value{window}"

    def queries(self, x: Tensor) -> Tensor:
        """(b, s, d) -> (b, h, s, c)."""
        return self._normed(self.q(x), self.q_norm)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(b, s, d) -> twice (b, g, s, c)."""
        return self._normed(self.k(x), self.k_norm), self._heads(self.v(x))

    def projected(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries and keys, rotated, and values."""
        q, (k, v) = self.queries(x), self.keys_values(x)
        return ctx.position.rotate(q, ctx.angles, self.layer), ctx.position.rotate(k, ctx.angles, self.layer), v

    def _normed(self, x: Tensor, norm: nn.Module) -> Tensor:
        if self.norm_full:
            return self._heads(norm(x))
        heads: Tensor = norm(x.unflatten(-1, (-1, self.head_dim)))  # (b, s, h*c) -> (b, s, h, c)
        return heads.transpose(1, 2)  # (b, s, h, c) -> (b, h, s, c)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (b, s, h*c) -> (b, h, s, c)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v = self.projected(x, ctx)
        return self.output(x, self.weighted(q, *self.kept(k, v, ctx), ctx.keys(self.layer), ctx.position))

    def kept(self, k: Tensor, v: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Returns keys and values of all tokens that the layer may see, those in the cache included."""
        if ctx.cache is None:
            return k, v
        [kept] = ctx.cache.append(self.layer, torch.cat([k, v], dim=1))  # (b, 2g, k, c)
        k, v = kept.chunk(2, dim=1)
        return k, v

    def output(self, x: Tensor, heads: Tensor) -> Tensor:
        """Gates the attention output of all heads, (b, h, s, c), by the layer's input x, and projects it to (b, s, d)."""
        if self.gate is not None:
            gate = self.gate(x).unflatten(-1, (heads.shape[1], -1)).transpose(1, 2)  # (b, s, h*c or h) -> (b, h, s, c or 1)
            heads = heads * gate.sigmoid()
        return self.joined(heads)

    def joined(self, heads: Tensor) -> Tensor:
        out: Tensor = self.o(self.inner_norm(heads.transpose(1, 2).flatten(2)))  # (b, h, s, c) -> (b, s, h*c)
        return out
