"""Multi-head, grouped-query and multi-query attention, and its variants."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from lm.nn.activation_memory import Activations, sum_activations
from lm.nn.context import Context
from lm.nn.init import halves
from lm.nn.mixers.base import Mixer, saved_weights
from lm.nn.mixers.behind_rotation import GrowingGQA, GrowingL2NormGQA, L2NormGQA, RotatedNormGQA
from lm.nn.mixers.choosing import ChoosingGQA
from lm.nn.mixers.disentangled import DisentangledConfig, DisentangledGQA
from lm.nn.mixers.forgetting import ForgettingGQA
from lm.nn.mixers.grouped import GQA, QueryGrowth
from lm.nn.mixers.indexer import IndexerConfig
from lm.nn.mixers.sharing import SharingConfig, ValueGQA
from lm.nn.mixers.streaming import StreamingGQA
from lm.nn.mixers.token_values import TokenValueGQA, TokenValueRotatedNormGQA, TokenValues, ValueEmbedding
from lm.nn.norm import NormConfig
from lm.nn.position.base import PositionConfig
from lm.ops.attention.attend import Scoring
from lm.ops.cache.cache import PerToken
from lm.schema import MOST, Tree


class GQAConfig(SharingConfig):
    """Scaled dot-product attention; n_kv_heads = n_heads is multi-head, 1 is multi-query (Ainslie et al. 2023, arXiv:2305.13245)."""

    kind: Literal["gqa"] = "gqa"
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an attention weight."""
    keep_first: int = Field(0, ge=0, le=MOST)
    """Behind its window a token sees the first so many of its document too, as if they stood right before it (Xiao et al. 2023,
    arXiv:2309.17453: 4)."""
    value_residual: bool = False
    """Values of each layer but the first become a v_first + b v, with learned a and b, 1/2 at first (Zhou et al. 2024,
    arXiv:2410.17897)."""
    value_embedding: ValueEmbedding | None = None
    """In some layers each token adds a vector of its own, from a table, to its value. null: in none."""
    query_growth: QueryGrowth | None = None
    """Queries grow with their position in the document. null: they do not."""
    indexer: IndexerConfig | None = None
    """A small attention chooses which tokens are seen (DeepSeek-V3.2). null: all are."""
    forget: bool = False
    """A score fades by what its head forgets between key and query: the sum of log sigmoid(w x + b) over the tokens behind the key, the
    query included (Lin et al. 2025, arXiv:2503.02130, which has no positions beside it)."""

    disentangled: DisentangledConfig | None = None
    """Scores also have what a query makes of the distance to a key, and a key of that to a query (DeBERTa). null: they do not."""

    @model_validator(mode="after")
    def _first_tokens_fit(self) -> Self:
        if self.keep_first and self.window is None:
            raise ValueError(f"keep_first={self.keep_first} has no effect without a window. Set window, or drop keep_first.")
        forms = {
            "value_embedding": self.value_embedding is not None, f"keep_first={self.keep_first}": self.keep_first > 0,
            "value_residual=true": self.value_residual, f"qk_norm={self.qk_norm}": self.qk_norm in ("rotated", "l2"),
            "query_growth": self.query_growth is not None, "indexer": self.indexer is not None, "forget=true": self.forget,
            "disentangled": self.disentangled is not None,
        }  # fmt: skip
        chosen = [form for form, used in forms.items() if used]
        if len(chosen) > 1 and chosen not in (["qk_norm=l2", "query_growth"], ["value_embedding", "qk_norm=rotated"]):
            raise ValueError(f"{chosen[0]} has no form with {chosen[1]}. Leave one of them out.")
        if chosen and (further := self.further()):
            raise ValueError(f"{chosen[0]} has no form with {further}. Leave one of them out.")
        if self.value_residual and self.global_heads is not None:
            raise ValueError("value_residual=true mixes values of heads that are alike, and global_heads are not. Leave one out.")
        if self.keep_first and self.chunked:
            raise ValueError(f"keep_first={self.keep_first} has no form with chunked=true. Leave one of them out.")
        return self

    def first(self, layer: int) -> int:
        """Returns how many first tokens of a document this layer sees beyond its window."""
        return 0 if self.layer_window(layer) is None else self.keep_first

    def require(self, d_model: int, position: PositionConfig) -> None:
        super().require(d_model, position)
        if self.keep_first and position.acts == "embed" and position.kind != "none":
            said = f"position={position.kind} has told already where they stand"
            raise ValueError(f"keep_first={self.keep_first} sets the first tokens right before the window, and {said}. Use position=rope.")
        if self.qk_norm == "l2" and position.acts != "rotate":
            raise ValueError(f"qk_norm=l2 is of layers that rotate, and position={position.kind} rotates none. Use position=rope, or head.")
        if self.value_embedding is not None and self.value_embedding.channels > d_model:
            raise ValueError(f"value_embedding.channels={self.value_embedding.channels} is above d_model={d_model}. Lower it.")
        if self.query_growth is not None:
            self.query_growth.require(position)
        if self.indexer is not None:
            self.indexer.require(self.rotary_width(d_model), position)
        if self.disentangled is not None and position.acts != "embed":
            raise ValueError(f"disentangled reads distances of its own, beside position={position.kind}. Use position=none, or learned.")

    def require_layers(self, layers: Sequence[int], drafts: bool) -> None:
        super().require_layers(layers, drafts)
        if self.value_residual and 0 not in layers:
            raise ValueError("value_residual=true mixes in the values of layer 0, which does not attend. Begin the pattern with attention.")
        if self.value_residual and drafts:
            raise ValueError("value_residual=true reads layer 0, without which the blocks of mtp draft. Leave one of them out.")
        if self.disentangled is not None and (0 not in layers or drafts):
            why = "the blocks of mtp draft without. Set mtp=null" if 0 in layers else "does not attend. Begin the pattern with attention"
            raise ValueError(f"disentangled has its vectors of distances in layer 0, which {why}.")
        for name in ("value_embedding", "indexer", "disentangled"):
            if getattr(self, name) is not None and type(self).build is not GQAConfig.build:
                raise ValueError(f"{name} has no form in attention={self.kind}. Set it to null.")
        if self.indexer is not None:
            self.indexer.require_layers(layers, drafts, self.window)
        if self.value_embedding is not None and drafts:
            raise ValueError("value_embedding looks up the token of a place, and the blocks of mtp read two. Leave one of them out.")
        if self.value_embedding is not None and not any(map(self.value_embedding.acts, layers)):
            remedy = "Lower it, or set at" if layers else "No layer attends: set value_embedding=null"
            raise ValueError(f"value_embedding.every={self.value_embedding.every} is of no layer that attends. {remedy}.")

    def scoring(self, d_model: int, layer: int) -> Scoring:
        return replace(super().scoring(d_model, layer), first=self.first(layer), dropout=self.dropout)

    def table(self, layer: int) -> ValueEmbedding | None:
        """Returns the value embedding of this layer; None where it has none."""
        return self.value_embedding if self.value_embedding is not None and self.value_embedding.acts(layer) else None

    def build_in(self, vocab_size: int, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        if (table := self.table(layer)) is None:
            return self.build(norm, d_model, layer)
        kind = TokenValueRotatedNormGQA if self.qk_norm == "rotated" else TokenValueGQA
        return kind(self, TokenValues(table, vocab_size, self.kv_heads, self.width(d_model)), norm, d_model, layer)

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        if self.value_residual:
            return (ResidualGQA if layer else FirstGQA)(self, norm, d_model, layer)
        if self.qk_norm == "rotated":
            return RotatedNormGQA(self, norm, d_model, layer)
        if self.qk_norm == "l2":
            return (L2NormGQA if self.query_growth is None else GrowingL2NormGQA)(self, norm, d_model, layer)
        if self.query_growth is not None:
            return GrowingGQA(self, norm, d_model, layer)
        if self.forget:
            return ForgettingGQA(self, norm, d_model, layer)
        if self.indexer is not None:
            return ChoosingGQA(self, self.indexer, norm, d_model, layer)
        if self.disentangled is not None:
            return DisentangledGQA(self, self.disentangled, norm, d_model, layer)
        if self.alters_values():
            return ValueGQA(self, norm, d_model, layer)
        return (StreamingGQA if self.first(layer) else GQA)(self, norm, d_model, layer)

    def cross(self) -> "GQAConfig":
        normed = {"rotated": "head", "l2": "none"}.get(self.qk_norm, self.qk_norm)  # nothing rotates between the two
        own = ("window", "global_every", "global_at", "query_growth", "value_embedding", "indexer", "disentangled")
        off: Tree = dict.fromkeys(own, None)
        none: Tree = {"keep_first": 0, "shared_layers": 0, "global_heads": None, "values": "own", "value_norm": False}
        return self.replace(**off, **none, chunked=False, value_residual=False, forget=False, qk_norm=normed)

    def build_cross(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return CrossAttention(self, norm, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        table, behind = self.table(layer), 4 * self.n_heads * self.width(d_model) * self._behind(layer, seq_len)
        gate = 0 if table is None else 2 * table.channels * self.kv_heads
        if self.indexer is None:
            of_distances = 0 if self.disentangled is None else self.disentangled.flops(self.n_heads * self.width(d_model))
            return super().flops(d_model, layer, seq_len) + behind + gate + of_distances
        return super().flops(d_model, layer, min(seq_len, self.indexer.top_k)) + self.indexer.flops(layer, seq_len)

    def _behind(self, layer: int, seq_len: int) -> int:
        return min(self.first(layer), max(0, seq_len - (self.layer_window(layer) or seq_len)))

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """In addition, v before the value residual; the vectors of tokens, and their gate before and behind its factor; with forget, gates,
        and keys and values for each head of queries; with keep_first, q, k, v and the attention output are twice as wide."""
        q, kv = self.n_heads * self.width(d_model), self.kv_width(d_model)
        mixed, twice = kv if self.value_residual and layer else 0, 2 * q + 2 * kv if self.first(layer) else 0
        gates, repeated = (self.n_heads, 2 * q - 2 * kv) if self.forget else (0, 0)
        looked_up = 0 if self.table(layer) is None else kv + 2 * self.kv_heads
        further = [] if self.indexer is None else [self.indexer.saved_activations(layer)]
        further += [] if self.disentangled is None else [self.disentangled.saved_activations(self.n_heads, q, kv)]
        own = Activations(gates, mixed + looked_up + twice + repeated)
        return sum_activations([super().saved_activations(d_model, layer), own, *further])

    def saved_scores(self, seq_len: int, device: str) -> Activations:
        softcap, dropout, sinks = self.softcap is not None, self.dropout > 0, self.gpt_oss_sinks
        learned = self.forget or self.disentangled is not None
        own = saved_weights(self.n_heads, seq_len, device, softcap=softcap, dropout=dropout, sinks=sinks, learned=learned)
        return own if self.indexer is None else sum_activations([own, self.indexer.saved_scores(seq_len)])

    def kernel_outputs(self, d_model: int, layer: int) -> Activations:
        """With keep_first, attention outputs are twice as wide."""
        kernel = super().kernel_outputs(d_model, layer)
        return sum_activations([kernel, Activations(0, kernel.narrow)]) if self.first(layer) else kernel

    def why_not_context_parallel(self, n: int) -> str | None:
        if self.forget:
            return "model.attention.forget sums gates over whole rows, of which a rank has a part. Set it to false"
        if self.disentangled is not None:
            return self.disentangled.why_not_parallel
        return super().why_not_context_parallel(n) if self.indexer is None else self.indexer.why_not_parallel

    def why_not_tensor_parallel(self, n: int) -> str | None:
        for name, heads in self.heads().items():
            if heads % n:
                return f"model.attention.{name}={heads} is not a multiple of it, and each rank has as many. Choose a divisor"
        if self.indexer is not None:
            return self.indexer.why_not_parallel
        if self.disentangled is not None:
            return self.disentangled.why_not_parallel
        if self.value_embedding is not None:
            return "model.attention.value_embedding has tables, of which no rank can hold a slice. Set it to null"
        if self.inner_norm is not None:
            return "model.attention.inner_norm is of all heads, of which a rank has some. Set it to null"
        if self.qk_norm == "full":
            return "model.attention.qk_norm=full is of all heads, of which a rank has some. Use qk_norm=head or none"
        return None

    def divided(self, d_model: int, n: int) -> "GQAConfig":
        return self.replace(n_heads=self.n_heads // n, n_kv_heads=self.kv_heads // n, head_dim=self.width(d_model))

    def state(self, d_model: int, layer: int) -> PerToken:
        """With forget, the log gate of each head too; the key of an indexer."""
        kept = super().state(d_model, layer)
        gates = ((self.n_heads, 1),) if self.forget else ()
        keys = () if self.indexer is None else self.indexer.state(layer)
        return replace(kept, tensors=(*kept.tensors, *gates, *keys), first=self.first(layer))

    def implied(self, d_model: int, layers: Sequence[int]) -> Tree:
        found = super().implied(d_model, layers)
        chosen = {} if self.indexer is None else self.indexer.implied(layers)
        return found | {"keep_first": 0 if found["window"] is None else self.keep_first} | chosen


class FirstGQA(GQA):
    """The first layer, whose values later layers mix into theirs."""

    def projected(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(x, ctx)
        ctx.shared["values"] = (v,)
        return q, k, v


class ResidualGQA(GQA):
    """GQA with values a v_first + b v, cached in this form; each layer learns a and b.  Zhou et al. 2024, arXiv:2410.17897."""

    initializers = {**GQA.initializers, "shares": halves}

    def __init__(self, cfg: GQAConfig, norm: NormConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, norm, d_model, layer)
        self.shares = nn.Parameter(torch.empty(2))

    def projected(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(x, ctx)
        [first] = ctx.shared["values"]
        of_first, own = self.shares.unbind()
        return q, k, of_first * first + own * v


class CrossAttention(GQA):
    """Queries from the decoder, keys and values from the encoder's output, with no positions.  Vaswani et al. 2017, section 3.2.3."""

    def prepare(self, ctx: Context, rows: int) -> None:
        """Its mask is of a source, and takes no form of its own."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        assert ctx.memory_mask is not None
        k, v = ctx.memory_keys(self.layer, self.keys_values)
        return self.output(x, self.weighted(self.queries(x), k, v, ctx.memory_mask, None))
