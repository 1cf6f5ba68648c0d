"""Attention whose scores have terms of contents and distances.  He et al. 2020, arXiv:2006.03654 (DeBERTa)."""

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from lm.nn.activation_memory import Activations
from lm.nn.context import Context
from lm.nn.linear import Embedding, Linear
from lm.nn.mixers.grouped import GQA, GroupedConfig
from lm.nn.norm import NormConfig
from lm.ops.attention.disentangled import of_distances
from lm.ops.attention.mask import Mask
from lm.ops.distance import signed_buckets
from lm.schema import MOST, Config

_TABLE = "distances"


class DisentangledConfig(Config):
    """A score is q_i . k_j + q_i . K_ij + k_j . Q_ij, where K and Q are keys and queries of vectors of distances (He et al. 2020,
    arXiv:2006.03654). All layers have the same vectors, in a table of the first. The paper multiplies by 1 / sqrt(3 head_dim) (`scale`)."""

    n_buckets: int = Field(256, gt=1, le=MOST)
    """Vectors of distances to earlier tokens, and as many to later ones."""
    max_distance: int | None = Field(512, gt=2)
    """Half the vectors are of one distance each, the others of ever more up to this one. null: all are of one, the last of all beyond."""
    terms: Literal["query_and_key", "query", "key"] = "query_and_key"
    """Which read distances: queries (c2p), keys (p2c), or both."""
    projections: Literal["shared", "own"] = "shared"
    """What makes keys and queries of the vectors: the layer's matrices for tokens, or further ones of its own."""
    norm: bool = True
    """A norm of the vectors, as those of the blocks."""

    @model_validator(mode="after")
    def _far_is_far(self) -> Self:
        if self.max_distance is not None and self.max_distance - 1 <= self.n_buckets // 2:
            exact = f"the {self.n_buckets // 2} distances that have a vector each, of n_buckets={self.n_buckets}"
            raise ValueError(f"max_distance={self.max_distance} leaves nothing to share beyond {exact}. Raise it, or set it to null.")
        return self

    def has(self, term: Literal["query", "key"]) -> bool:
        """Returns whether scores have this term."""
        return term in self.terms

    def flops(self, width: int) -> int:
        """Counts the scores of all vectors.  width: of the queries of all heads."""
        return 2 * width * 2 * self.n_buckets * (self.has("query") + self.has("key"))

    def saved_activations(self, n_heads: int, q_width: int, kv_width: int) -> Activations:
        """Counts queries and keys as they were before the scores were scaled, and the scores of all vectors. The vectors' own keys and
        queries are of no token, and which is between which tokens is the same in all layers."""
        scores, queries, keys = 2 * self.n_buckets * n_heads, self.has("query"), self.has("key")
        return Activations(0, (q_width + scores) * queries + (kv_width + scores) * keys)

    @property
    def why_not_parallel(self) -> str:
        """Returns why no ranks share a row or a layer's heads, with the remedy."""
        return "model.attention.disentangled reads distances of whole rows for all heads, of which a rank has some. Set it to null"


class DisentangledGQA(GQA):
    """GQA whose scores have the terms of distances, too; the first layer tells later ones the vectors."""

    def __init__(self, cfg: GroupedConfig, distances: DisentangledConfig, norm: NormConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, norm, d_model, layer)
        self.distances = distances
        if layer == 0:
            self.table = Embedding(2 * distances.n_buckets, d_model)
            self.table_norm = norm.build(d_model) if distances.norm else nn.Identity()
        own = distances.projections == "own"
        self.distance_q = Linear(d_model, self.q.out_features, bias=cfg.qkv_bias) if own and distances.has("key") else None
        self.distance_k = Linear(d_model, self.k.out_features, bias=cfg.qkv_bias) if own and distances.has("query") else None

    def prepare(self, ctx: Context, rows: int) -> None:
        """Its bias is of this layer's input, and takes no form before that is there."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        if self.layer == 0:
            rows = torch.arange(self.table.num_embeddings, device=x.device)
            ctx.shared[_TABLE] = (self.table_norm(self.table(rows))[None],)  # (1, n, d)
        q, k, v = self.projected(x, ctx)
        k, v = self.kept(k, v, ctx)
        mask, (table,) = ctx.keys(self.layer), ctx.shared[_TABLE]
        keys = self._of(table, self.distance_k, self.k, self.k_norm) if self.distances.has("query") else None
        queries = self._of(table, self.distance_q, self.q, self.q_norm) if self.distances.has("key") else None
        return self.output(x, self.attended(q, k, v, mask, of_distances(q, k, keys, queries, self._rows(mask))))

    def _of(self, table: Tensor, own: nn.Module | None, shared: nn.Module, norm: nn.Module) -> Tensor:
        """(1, n, d) -> (h, n, c): queries or keys of the vectors, which are fewer than the scores, times the scale of these."""
        return self._normed((shared if own is None else own)(table), norm)[0] * self.how.scale

    def _rows(self, mask: Mask) -> Tensor:
        """Returns the row of the table for each query and key, (b, q, k)."""

        def build() -> Tensor:
            distance = mask.q_positions.unsqueeze(-1) - mask.k_positions.unsqueeze(-2)
            return signed_buckets(distance, self.distances.n_buckets, self.distances.max_distance)

        return mask.once(_TABLE, build)
