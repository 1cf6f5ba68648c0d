"""Multi-head latent attention: keys and values are kept as one small latent per token.  DeepSeek-V2, arXiv:2405.04434, section 2.1."""

import math
from collections.abc import Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from lm.nn.activation_memory import Activations, sum_activations
from lm.nn.context import Context
from lm.nn.linear import AskedLinear, Linear, Out
from lm.nn.mixers.base import Attention, AttentionConfig, Mixer, saved_weights
from lm.nn.mixers.grouped import QueryGrowth
from lm.nn.mixers.indexer import Choosing, IndexerConfig
from lm.nn.norm import NormConfig, RMSNorm
from lm.nn.position.base import PositionConfig
from lm.ops.attention.attend import Scoring
from lm.ops.cache.cache import PerToken
from lm.schema import MOST, Tree


class MLAConfig(AttentionConfig):
    """DeepSeek's latent attention; a token's cache is kv_rank + rope_dim numbers a layer, for all heads together."""

    by_heads = True

    kind: Literal["mla"] = "mla"
    q_rank: int | None = Field(None, gt=0, le=MOST)
    """Width of the query latent. null: queries are projected directly."""
    kv_rank: int = Field(gt=0, le=MOST)
    """Width of the latent that keys and values are made of."""
    nope_dim: int = Field(gt=0, le=MOST)
    """Dimensions of a head's key without rotation."""
    rope_dim: int = Field(gt=0, multiple_of=2, le=MOST)
    """Dimensions of the key that all heads share, which is rotated; with position=none it is shared alone (Kimi Linear)."""
    v_dim: int = Field(gt=0, le=MOST)
    """Dimensions of a head's value."""
    bias: bool = False
    """Bias on the projections into the latents and out of the heads (an option of DeepSeek-V3)."""
    latent_eps: float = Field(1e-6, ge=1e-30)
    """eps of the RMSNorm on each latent (DeepSeek has one beside norm.eps)."""
    scale: float | None = Field(None, gt=0)
    """Factor on the scores. null: 1 / sqrt(nope_dim + rope_dim)."""
    query_growth: QueryGrowth | None = None
    """Queries grow with their position in the document (Mistral Small 4). null: they do not."""
    indexer: IndexerConfig | None = None
    """A small attention chooses which tokens are seen (DeepSeek-V3.2). null: all are."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an attention weight."""

    @model_validator(mode="after")
    def _indexer_fits(self) -> Self:
        if self.indexer is not None and self.query_growth is not None:
            raise ValueError("query_growth has no form with indexer. Leave one of them out.")
        return self

    def rotary_width(self, d_model: int) -> int:
        return self.rope_dim

    def score_width(self, d_model: int) -> int:
        return self.nope_dim + self.rope_dim

    def require(self, d_model: int, position: PositionConfig) -> None:
        if position.acts != "rotate" and position.kind != "none":
            raise ValueError(f"attention=mla keeps {self.rope_dim} dimensions for rotation, and position={position.kind} does not rotate."
                             " Use position=rope or none, or another attention.")  # fmt: skip
        if self.query_growth is not None:
            self.query_growth.require(position)
        if self.indexer is not None:
            self.indexer.require(self.rope_dim, position)

    def require_layers(self, layers: Sequence[int], drafts: bool) -> None:
        if self.indexer is not None:
            self.indexer.require_layers(layers, drafts, None)

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return (ChoosingMLA if self.indexer is not None else MLA if self.query_growth is None else GrowingMLA)(self, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        """Counts scores and weighted values, with keys and values expanded from the latent."""
        each = 2 * self.n_heads * (self.nope_dim + self.rope_dim + self.v_dim)
        return each * seq_len if self.indexer is None else each * min(seq_len, self.indexer.top_k) + self.indexer.flops(layer, seq_len)

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Counts latents twice (before and after their norm), q, k, v, and the weighted values before and after heads are joined."""
        latents, width = (self.q_rank or 0) + self.kv_rank, self.n_heads * (self.nope_dim + self.rope_dim)
        own = Activations(0, 2 * latents + 2 * width + 3 * self.n_heads * self.v_dim, 0, d_model)
        return own if self.indexer is None else sum_activations([own, self.indexer.saved_activations(layer)])

    def saved_scores(self, seq_len: int, device: str) -> Activations:
        own = saved_weights(self.n_heads, seq_len, device, dropout=self.dropout > 0)
        return own if self.indexer is None else sum_activations([own, self.indexer.saved_scores(seq_len)])

    def why_not_context_parallel(self, n: int) -> str | None:
        return super().why_not_context_parallel(n) if self.indexer is None else self.indexer.why_not_parallel

    def kernel_outputs(self, d_model: int, layer: int) -> Activations:
        """Counts the weighted values, and a logsumexp of each head."""
        return Activations(self.n_heads, self.n_heads * self.v_dim)

    def exchanged_activations(self, d_model: int, n: int) -> Activations:
        """Counts the attention output once more, on the other side of the exchange back to tokens."""
        return Activations(0, self.n_heads * self.v_dim)

    def state(self, d_model: int, layer: int) -> PerToken:
        """The latent and the rotated key, and the key of an indexer."""
        return PerToken(((1, self.kv_rank), (1, self.rope_dim), *(() if self.indexer is None else self.indexer.state(layer))))

    def implied(self, d_model: int, layers: Sequence[int]) -> Tree:
        return {"scale": self.scale or self.score_width(d_model) ** -0.5, **(self.indexer.implied(layers) if self.indexer else {})}


class MLA(Attention):
    """Without a cache, keys and values are expanded from the latent. With one, the expansion is absorbed into query and output:
    q_nope (W_k c) = (q_nope W_k) c, so that attention runs over the latents as if they were one shared key and value head."""

    def __init__(self, cfg: MLAConfig, d_model: int, layer: int) -> None:
        h, width = cfg.n_heads, cfg.nope_dim + cfg.rope_dim
        super().__init__(layer, width, Scoring(cfg.scale or 1 / math.sqrt(width), dropout=cfg.dropout))
        self.cfg = cfg
        if cfg.q_rank is None:
            self.q = Linear(d_model, h * width, bias=False)
        else:
            self.q_down = Linear(d_model, cfg.q_rank, bias=cfg.bias)
            self.q_norm = RMSNorm(cfg.q_rank, cfg.latent_eps)
            self.q_up = Linear(cfg.q_rank, h * width, bias=False)
        self.kv_down = Linear(d_model, cfg.kv_rank + cfg.rope_dim, bias=cfg.bias)
        self.kv_norm = RMSNorm(cfg.kv_rank, cfg.latent_eps)
        self.k_up = AskedLinear(cfg.kv_rank, h * cfg.nope_dim, bias=False)
        self.v_up = AskedLinear(cfg.kv_rank, h * cfg.v_dim, bias=False)
        self.o = Out(h * cfg.v_dim, d_model, bias=cfg.bias)

    def extra_repr(self) -> str:
        return f"{self.cfg.n_heads} heads, latent of {self.cfg.kv_rank} + {self.cfg.rope_dim}"

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        cfg = self.cfg
        source = self.source(x)
        q_nope, q_rope = self.queries(source, ctx).split([cfg.nope_dim, cfg.rope_dim], dim=-1)
        latent, k_rope = self.kv_down(x).split([cfg.kv_rank, cfg.rope_dim], dim=-1)
        latent, k_rope = self.kv_norm(latent).unsqueeze(1), k_rope.unsqueeze(1)  # (b, s, r) -> (b, 1, s, r)
        q_rope = ctx.position.rotate(q_rope, ctx.angles, self.layer)
        k_rope = ctx.position.rotate(k_rope, ctx.angles, self.layer)
        further = self.further(x, ctx)
        if ctx.cache is None:
            k, v = self._expanded(latent, k_rope)
            return self.joined(self.read(x, source, further, (torch.cat([q_nope, q_rope], dim=-1), k, v), ctx))
        latent, k_rope, *further = ctx.cache.append(self.layer, latent, k_rope, *further)
        q_nope = q_nope @ self.k_up.matrix().unflatten(0, (cfg.n_heads, -1))  # (b, h, s, nope) -> (b, h, s, r)
        q, k = torch.cat([q_nope, q_rope], dim=-1), torch.cat([latent, k_rope], dim=-1)  # (b, 1, k, r + rope)
        out = self.read(x, source, further, (q, k, latent), ctx)
        return self.joined(out @ self.v_up.matrix().unflatten(0, (cfg.n_heads, -1)).transpose(-1, -2))  # (b, h, s, r) -> (b, h, s, v)

    def source(self, x: Tensor) -> Tensor:
        """Returns what queries are made of: a latent, (b, s, q_rank), or x itself, (b, s, d)."""
        return x if self.cfg.q_rank is None else self.q_norm(self.q_down(x))

    def queries(self, source: Tensor, ctx: Context) -> Tensor:
        """(b, s, d or q_rank) -> (b, h, s, nope + rope), not rotated."""
        q = self.q(source) if self.cfg.q_rank is None else self.q_up(source)
        heads: Tensor = q.unflatten(-1, (self.cfg.n_heads, -1)).transpose(1, 2)
        return heads

    def further(self, x: Tensor, ctx: Context) -> Sequence[Tensor]:
        """Returns what else of these tokens a cache keeps, (b, 1, s, c) each."""
        return ()

    def read(self, x: Tensor, source: Tensor, further: Sequence[Tensor], qkv: tuple[Tensor, Tensor, Tensor], ctx: Context) -> Tensor:
        """Returns what is read, (b, h, q, w).  qkv: as in `Attend`; further: of all keys."""
        return self.weighted(*qkv, ctx.keys(self.layer), ctx.position)

    def _expanded(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of all heads."""
        h = self.cfg.n_heads
        k, v = (up(latent.squeeze(1)).unflatten(-1, (h, -1)).transpose(1, 2) for up in (self.k_up, self.v_up))  # (b, h, s, c)
        return torch.cat([k, k_rope.expand(-1, h, -1, -1)], dim=-1), v


class GrowingMLA(MLA):
    """MLA whose queries grow with their position, which their rotation does not change."""

    def queries(self, source: Tensor, ctx: Context) -> Tensor:
        assert self.cfg.query_growth is not None
        return self.cfg.query_growth.grown(super().queries(source, ctx), ctx, self.layer)


class ChoosingMLA(Choosing, MLA):
    """MLA to what an indexer has chosen."""

    def __init__(self, cfg: MLAConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, d_model, layer)
        assert cfg.indexer is not None
        self.add_indexer(cfg.indexer, cfg.q_rank or d_model, d_model)

    def further(self, x: Tensor, ctx: Context) -> Sequence[Tensor]:
        return self.index_keys(x, ctx)

    def read(self, x: Tensor, source: Tensor, further: Sequence[Tensor], qkv: tuple[Tensor, Tensor, Tensor], ctx: Context) -> Tensor:
        return self.of_chosen(x, source, further, qkv, ctx)
