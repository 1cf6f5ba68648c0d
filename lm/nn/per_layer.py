"""Per-layer embeddings: every layer reads a small vector of each token, from a table of its own beside a projection of the embedding."""

import math

from pydantic import Field
from torch import Tensor, nn

from lm.nn.activation_memory import Activations
from lm.nn.context import Context
from lm.nn.ffn.mlp import Activation, activation_of, steps_of
from lm.nn.linear import Embedding, Linear, Out
from lm.nn.norm import Branch, NormConfig
from lm.schema import MOST, Config

LAYERS_TABLE = "per_layer.rows.table.weight"
"""How the name of the table ends whose rows hold each token's vectors."""


class PerLayerConfig(Config):
    """Behind its feed-forward each layer adds what a gated vector of the token's gives; all layers' vectors are looked up at once (Gemma
    3n and 4, Google 2025 and 2026)."""

    channels: int = Field(gt=0, le=MOST)
    """Width of a token's vector for one layer (Gemma 3n: 256)."""
    activation: Activation = "gelu_tanh"
    """Of the gate, a projection of the residual stream."""

    def require(self, model: str, block: str, residual: str, drafts: bool) -> None:
        """Raises ValueError where layers cannot read vectors of their own.  model, block, residual: their kinds; drafts: mtp has blocks."""
        if model == "encoder_decoder":
            raise ValueError("embed.per_layer has no form in layers with cross-attention. Set it to null in an encoder-decoder.")
        if block != "sequential":
            raise ValueError(f"embed.per_layer is read behind the feed-forward, and block={block} has no such place. Use block=sequential.")
        if residual == "hyper":
            raise ValueError("embed.per_layer adds to one residual stream, and residual=hyper has several. Leave one of them out.")
        if drafts:
            raise ValueError("embed.per_layer has a vector for each layer, and blocks of mtp are beyond them. Set mtp=null, or drop it.")

    def saved_activations(self, d_model: int) -> Activations:
        """Returns what autograd saves of one token in a layer: what the gate reads, and what the last norm does; its vector before and
        behind the first norm; the gate before and behind its activation, and the product."""
        return Activations(2 * (d_model + self.channels), (1 + steps_of(self.activation)) * self.channels)


class TokenRows(nn.Module):
    """given + scale * table[token]."""

    def __init__(self, vocab_size: int, width: int, scale: float) -> None:
        super().__init__()
        self.table, self.scale = Embedding(vocab_size, width), scale

    def forward(self, given: Tensor, ctx: Context) -> Tensor:
        """(b, s, width) -> (b, s, width)."""
        assert ctx.tokens is not None
        return given + self.table(ctx.tokens).to(given.dtype) * self.scale


class PerLayer(nn.Module):
    """(norm(P x / sqrt(d)) + sqrt(c) table[token]) / sqrt(2), c numbers for each layer."""

    def __init__(self, cfg: PerLayerConfig, norm: NormConfig, d_model: int, vocab_size: int, n_layers: int) -> None:
        super().__init__()
        self.channels = cfg.channels
        self.projection = Linear(d_model, n_layers * cfg.channels, bias=False)
        self.norm = norm.build(cfg.channels)
        self.rows = TokenRows(vocab_size, n_layers * cfg.channels, math.sqrt(cfg.channels))

    def forward(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        """Returns for each layer what it reads, (b, s, c).  x: what the first layer reads, (b, s, d)."""
        given: Tensor = self.norm((self.projection(x) * x.shape[-1] ** -0.5).unflatten(-1, (-1, self.channels)))
        both: Tensor = self.rows(given.flatten(2), ctx) * 0.5**0.5
        return both.unflatten(-1, (-1, self.channels)).unbind(2)  # (b, s, n*c) -> n times (b, s, c)


class PerLayerRead(nn.Module):
    """x + norm(o(act(g(x)) * own)), the last sublayer of a layer; own is what `PerLayer` gives it."""

    def __init__(self, cfg: PerLayerConfig, norm: NormConfig, d_model: int, branch: Branch) -> None:
        super().__init__()
        self.gate = Linear(d_model, cfg.channels, bias=False)
        self.out = Out(cfg.channels, d_model, bias=False)
        self.norm, self.branch = norm.build(d_model), branch
        self.act = activation_of(cfg.activation)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        assert ctx.own is not None
        added: Tensor = self.branch(self.norm(self.out(self.act(self.gate(x)) * ctx.own)))
        return x + added
