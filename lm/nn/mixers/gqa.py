"""Multi-head, grouped-query and multi-query attention."""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from lm.nn.context import Context
from lm.nn.cost.kept import Kept
from lm.nn.init import Draw, halves
from lm.nn.linear import Out
from lm.nn.mixers.attend import Scoring
from lm.nn.mixers.base import Attention, AttentionConfig, Mixer
from lm.nn.mixers.cache import PerToken
from lm.nn.mixers.columns import Divisible
from lm.nn.mixers.ulysses import repeats
from lm.nn.norm import NormConfig
from lm.nn.position.base import PositionConfig
from lm.schema import MOST, Tree


class GQAConfig(AttentionConfig):
    """Scaled dot-product attention; n_kv_heads = n_heads is multi-head, 1 is multi-query (Ainslie et al. 2023, arXiv:2305.13245)."""

    by_heads: ClassVar[bool] = True

    kind: Literal["gqa"] = "gqa"
    n_kv_heads: int | None = Field(None, gt=0, le=MOST)
    """Number of key and value heads; divides n_heads. null: n_heads."""
    head_dim: int | None = Field(None, gt=0, le=MOST)
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
    global_at: int | None = Field(None, ge=0)
    """Which of every n layers that is, counted from 0 (ModernBERT: 0). null: the last."""
    softcap: float | None = Field(None, gt=0)
    """Scores become softcap * tanh(score / softcap) (Gemma 2). null: off."""
    scale: float | None = Field(None, gt=0)
    """Factor on the scores. null: 1 / sqrt(head_dim)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an attention weight."""
    out_gate: Literal["none", "head", "element"] = "none"
    """What is read is multiplied by the sigmoid of a projection of the layer's input: a number per head, or one per element (Qwen3-Next;
    Qiu et al. 2025, arXiv:2505.06708)."""
    value_residual: bool = False
    """Values of each layer but the first become a v_first + b v, with learned a and b, 1/2 at first (Zhou et al. 2024,
    arXiv:2410.17897)."""
    gpt_oss_sinks: bool = False
    """gpt-oss: a learned score per head that takes its part of each softmax and has no value."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            divisors = ", ".join(str(n) for n in range(1, self.n_heads + 1) if self.n_heads % n == 0)
            raise ValueError(f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}. Choose one of {divisors}.")
        if self.global_every is not None and self.window is None:
            raise ValueError(f"global_every={self.global_every} has no effect without a window. Set window, or drop global_every.")
        if self.global_at is not None and self.global_at >= (self.global_every or 0):
            raise ValueError(f"global_at={self.global_at} is none of global_every={self.global_every} layers. Lower it, or drop it.")
        return self

    def width(self, d_model: int) -> int:
        """Width of one head."""
        return self.head_dim or d_model // self.n_heads

    def kv_width(self, d_model: int) -> int:
        """Returns the width of all keys, which is that of all values."""
        return (self.n_kv_heads or self.n_heads) * self.width(d_model)

    def gate_width(self, d_model: int) -> int:
        """Returns the numbers that the heads are multiplied by; 0 without a gate."""
        return {"none": 0, "head": self.n_heads, "element": self.n_heads * self.width(d_model)}[self.out_gate]

    def rotary_width(self, d_model: int) -> int:
        return self.width(d_model)

    def require(self, d_model: int, position: PositionConfig) -> None:
        if self.head_dim is None and d_model % self.n_heads:
            raise ValueError(f"d_model={d_model} is not a multiple of n_heads={self.n_heads}. Change one, or set head_dim.")

    def require_layers(self, first: bool, drafts: bool) -> None:
        if self.value_residual and not first:
            raise ValueError("value_residual=true mixes in the values of layer 0, which does not attend. Begin the pattern with attention.")
        if self.value_residual and drafts:
            raise ValueError("value_residual=true reads layer 0, without which the blocks of mtp draft. Leave one of them out.")

    def layer_window(self, layer: int) -> int | None:
        if self.global_every is None:
            return self.window
        at = self.global_every - 1 if self.global_at is None else self.global_at
        return None if layer % self.global_every == at else self.window

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        kind = GQA if not self.value_residual else ResidualGQA if layer else FirstGQA
        return kind(self, norm, d_model, layer)

    def cross(self) -> "GQAConfig":
        return self.replace(window=None, global_every=None, global_at=None, value_residual=False)

    def build_cross(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return CrossAttention(self, norm, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        """Of scores and weighted values."""
        return 4 * self.n_heads * self.width(d_model) * min(seq_len, self.layer_window(layer) or seq_len)

    def keeps(self, d_model: int, layer: int) -> Kept:
        """q, k, v and the weighted values; q and k once more before a norm of theirs, v before it is mixed; a gate, and what it gives."""
        q, kv, gate = self.n_heads * self.width(d_model), self.kv_width(d_model), self.gate_width(d_model)
        normed, gated = q + kv if self.qk_norm != "none" else 0, q + 2 * gate if gate else 0
        mixed = kv if self.value_residual and layer else 0
        return Kept(0, 2 * q + 2 * kv + normed + mixed + gated, 0, 2 * d_model)

    def undivided(self, n: int) -> str | None:
        for name, heads in (("n_heads", self.n_heads), ("n_kv_heads", self.n_kv_heads or self.n_heads)):
            if heads % n:
                return f"model.attention.{name}={heads} is not a multiple of it, and each rank has as many. Choose a divisor"
        if self.qk_norm == "full":
            return "model.attention.qk_norm=full is of all heads, of which a rank has some. Use qk_norm=head or none"
        return None

    def divided(self, d_model: int, n: int) -> "GQAConfig":
        heads, width = self.n_kv_heads or self.n_heads, self.width(d_model)
        return self.replace(n_heads=self.n_heads // n, n_kv_heads=heads // n, head_dim=width)

    def exchanges(self, d_model: int, n: int) -> Kept:
        """What was read, on both sides of its way back; and copies of keys and values."""
        copies = repeats(self.n_kv_heads or self.n_heads, n) - 1
        return Kept(0, self.n_heads * self.width(d_model) + 2 * copies * self.kv_width(d_model))

    def state(self, d_model: int, layer: int) -> PerToken:
        """Keys, and behind their heads those of values."""
        return PerToken(((2 * (self.n_kv_heads or self.n_heads), self.width(d_model)),), self.layer_window(layer))

    def implied(self, d_model: int, n_layers: int) -> Tree:
        width, seen_whole = self.width(d_model), [self.layer_window(layer) is None for layer in range(n_layers)]
        every, at = evenly(seen_whole) or (None, None)
        return {
            "n_kv_heads": self.n_kv_heads or self.n_heads,
            "head_dim": width,
            "scale": self.scale or width**-0.5,
            "window": None if all(seen_whole) else self.window,
            "global_every": None if all(seen_whole) else every,
            "global_at": at,
        }


def evenly(chosen: Sequence[bool]) -> tuple[int, int | None] | None:
    """Returns the least n so that one in every n is chosen, and its place there (None: the last). None: none is, or not so."""
    places = [i for i, one in enumerate(chosen) if one]
    if not places:
        return None
    first = places[0]
    every = places[1] - first if len(places) > 1 else max(first + 1, len(chosen) - first)
    if places != list(range(first, len(chosen), every)) or first >= every:
        return None
    return every, None if first == every - 1 else first


class GQA(Attention, Divisible):
    """Project, norm, rotate, cache, attend, project."""

    cut: ClassVar[Mapping[str, int]] = {**Divisible.cut_by(("q", "k", "v", "gate"), "o"), "sinks": 0}

    def __init__(self, cfg: GQAConfig, norm: NormConfig, d_model: int, layer: int) -> None:
        head_dim, window = cfg.width(d_model), cfg.layer_window(layer)
        how = Scoring(cfg.scale or 1 / math.sqrt(head_dim), window, cfg.softcap, cfg.dropout)
        super().__init__(layer, head_dim, how, cfg.n_heads if cfg.gpt_oss_sinks else 0)
        q_width, kv_width = cfg.n_heads * head_dim, cfg.kv_width(d_model)
        self.q = nn.Linear(d_model, q_width, bias=cfg.qkv_bias)
        self.k = nn.Linear(d_model, kv_width, bias=cfg.qkv_bias)
        self.v = nn.Linear(d_model, kv_width, bias=cfg.qkv_bias)
        self.o = Out(q_width, d_model, bias=cfg.out_bias)
        self.gate = nn.Linear(d_model, cfg.gate_width(d_model), bias=cfg.qkv_bias) if cfg.out_gate != "none" else None
        self.norm_full = cfg.qk_norm == "full"
        self.q_norm, self.k_norm = (
            nn.Identity() if cfg.qk_norm == "none" else norm.build(width if self.norm_full else head_dim) for width in (q_width, kv_width)
        )

    def extra_repr(self) -> str:
        heads, groups = (linear.out_features // self.head_dim for linear in (self.q, self.k))
        window = f", window {self.how.window}" if self.how.window else ""
        return f"{heads} heads of {self.head_dim}, {groups} key-value{window}"

    def queries(self, x: Tensor) -> Tensor:
        """(b, s, d) -> (b, h, s, c)."""
        return self._heads(self.q(x), self.q_norm)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(b, s, d) -> twice (b, g, s, c)."""
        return self._heads(self.k(x), self.k_norm), self._heads(self.v(x), None)

    def projected(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, rotated, and values."""
        q, (k, v) = self.queries(x), self.keys_values(x)
        return ctx.position.rotate(q, ctx.angles, self.layer), ctx.position.rotate(k, ctx.angles, self.layer), v

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is not None and self.norm_full:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))  # (b, s, h*c) -> (b, s, h, c)
        if norm is not None and not self.norm_full:
            x = norm(x)
        return x.transpose(1, 2)  # (b, s, h, c) -> (b, h, s, c)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v = self.projected(x, ctx)
        if ctx.cache is not None:
            [kept] = ctx.cache.append(self.layer, torch.cat([k, v], dim=1))  # (b, 2g, k, c)
            k, v = kept.chunk(2, dim=1)
        return self.told(x, self.weighted(q, k, v, ctx.keys(self.layer), ctx.position))

    def told(self, x: Tensor, heads: Tensor) -> Tensor:
        """What the heads have read, (b, h, s, c), gated by the layer's input and joined, (b, s, d)."""
        if self.gate is not None:
            gate = self.gate(x).unflatten(-1, (heads.shape[1], -1)).transpose(1, 2)  # (b, s, h*c or h) -> (b, h, s, c or 1)
            heads = heads * gate.sigmoid()
        return self.joined(heads)


class FirstGQA(GQA):
    """The first layer, whose values later ones mix in."""

    def projected(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(x, ctx)
        ctx.values = v
        return q, k, v


class ResidualGQA(GQA):
    """Its values are a v_first + b v, and kept so in a cache.  Zhou et al. 2024, arXiv:2410.17897, with learned a and b of each layer."""

    drawn: ClassVar[Mapping[str, Draw]] = {**GQA.drawn, "shares": halves}

    def __init__(self, cfg: GQAConfig, norm: NormConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, norm, d_model, layer)
        self.shares = nn.Parameter(torch.empty(2))

    def projected(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(x, ctx)
        assert ctx.values is not None
        of_first, own = self.shares.unbind()
        return q, k, of_first * ctx.values + own * v


class CrossAttention(GQA):
    """Queries from the decoder, keys and values from the encoder's output, with no positions.  Vaswani et al. 2017, section 3.2.3."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        assert ctx.memory_mask is not None
        k, v = ctx.memory_keys(self.layer, self.keys_values)
        return self.told(x, self.weighted(self.queries(x), k, v, ctx.memory_mask, None))
