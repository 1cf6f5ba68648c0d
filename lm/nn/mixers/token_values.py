"""Value embeddings: in some layers each token adds a vector of its own to its value."""

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lm.errors import ConfigError
from lm.nn.context import Context
from lm.nn.init import Declares, zeros
from lm.nn.linear import Embedding
from lm.nn.mixers.behind_rotation import RotatedNormGQA
from lm.nn.mixers.grouped import GQA, GroupedConfig
from lm.nn.norm import NormConfig
from lm.nn.spacing import is_there, require_place
from lm.schema import MOST, MOST_LAYERS, Config

TABLE = "token_values.table.weight"
"""How the names of the tables end, which have a row for each entry of the vocabulary."""


class ValueEmbedding(Config):
    """In some layers v becomes v + gate * table[token]: each such layer has a table, and a gate for each head of values (modded-nanogpt,
    nanochat)."""

    every: int = Field(2, gt=0, le=MOST_LAYERS)
    """Every n-th layer has a table (layer n-1, 2n-1, ...)."""
    at: int | None = Field(None, ge=0)
    """Which of every n layers that is, counted from 0. null: the last."""
    channels: int = Field(12, gt=0, le=MOST)
    """The first so many numbers of the layer's input decide the gate."""
    most: float = Field(2.0, gt=0)
    """The gate is this times a sigmoid, which is 1/2 at first (modded-nanogpt: 2; nanochat: 3)."""

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        require_place("every", self.every, "at", self.at)
        return self

    def acts(self, layer: int) -> bool:
        """Returns whether this layer has a table."""
        return is_there(layer, self.every, self.at)


class TokenValues(Declares, nn.Module):
    """most * sigmoid(W x[:channels]) * table[token], a gate for each head; W is 0 at first.

    Of modded-nanogpt (https://github.com/KellerJordan/modded-nanogpt), after the residual of values of Zhou et al. 2024, arXiv:2410.17897.
    nanochat's of July 2026 has most=3, and W drawn from 0 to 0.02. W reads as many numbers at any width, and so learns as a vector does.
    """

    initializers = {"gate": zeros}

    def __init__(self, cfg: ValueEmbedding, vocab_size: int, n_heads: int, head_dim: int) -> None:
        super().__init__()
        self.cfg, self.n_heads = cfg, n_heads
        self.table = Embedding(vocab_size, n_heads * head_dim)
        self.gate = nn.Parameter(torch.empty(n_heads, cfg.channels))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Returns what is added to the values, (b, g, s, c).  x: the layer's input, (b, s, d)."""
        if ctx.tokens is None:
            raise ConfigError("attention.value_embedding looks up tokens, and this context has none. Set ctx.tokens, (b, s).")
        gate = self.cfg.most * F.linear(x[..., : self.cfg.channels], self.gate).sigmoid()  # (b, s, d) -> (b, s, g)
        found = self.table(ctx.tokens).to(gate.dtype).unflatten(-1, (self.n_heads, -1))  # (b, s) -> (b, s, g, c)
        return (gate.unsqueeze(-1) * found).transpose(1, 2)  # (b, s, g, c) -> (b, g, s, c)


class TokenValueGQA(GQA):
    """GQA with values v + gate * table[token], cached in this form."""

    def __init__(self, cfg: GroupedConfig, token_values: TokenValues, norm: NormConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, norm, d_model, layer)
        self.token_values = token_values

    def projected(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(x, ctx)
        return q, k, v + self.token_values(x, ctx)


class TokenValueRotatedNormGQA(TokenValueGQA, RotatedNormGQA):
    """Both."""
