"""The decoder-only stack: embedding, blocks, head."""

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lm.config import Config
from lm.nn.batch import Batch
from lm.nn.block import BlockParts, ParallelConfig, SequentialConfig, build_block
from lm.nn.cache import Cache
from lm.nn.context import Context
from lm.nn.init import InitConfig, init_weights
from lm.nn.mask import Mask, arange_positions
from lm.nn.norm import build_norm
from lm.nn.position import build_position
from lm.nn.rope import RopeConfig
from lm.nn.slots import AttentionConfig, BlockConfig, FFNConfig, NormConfig, PositionConfig


class DecoderConfig(Config):
    """A decoder-only Transformer, assembled from slots."""

    kind: Literal["decoder"] = "decoder"
    vocab_size: int | None = Field(None, gt=0)
    """Rows of the embedding. null: the tokenizer's size, rounded up to a multiple of 64."""
    max_seq_len: int | None = Field(None, gt=0)
    """Longest sequence. null: data.seq_len."""
    d_model: int = Field(gt=0)
    """Width of the residual stream."""
    n_layers: int = Field(gt=0)
    """Number of blocks."""
    norm: NormConfig
    position: PositionConfig
    attention: AttentionConfig
    ffn: FFNConfig
    block: BlockConfig = SequentialConfig()
    init: InitConfig = InitConfig()
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an element of the embedding or of a sublayer's output."""
    tied_head: bool = True
    """The output head is the embedding matrix."""
    head_softcap: float | None = Field(None, gt=0)
    """Logits become softcap * tanh(logits / softcap) (Gemma 2). null: off."""
    embed_scale: float = Field(1.0, gt=0)
    """Factor on token embeddings (sqrt(d_model) in Vaswani et al. and Gemma)."""

    @model_validator(mode="after")
    def _slots_fit(self) -> Self:
        a = self.attention
        if a.head_dim is None and self.d_model % a.n_heads:
            raise ValueError(f"d_model={self.d_model} is not a multiple of n_heads={a.n_heads}. Change one, or set head_dim.")
        if isinstance(self.position, RopeConfig):
            self.position.rotary_dim(a.width(self.d_model))
        if isinstance(self.block, ParallelConfig) and self.norm.place != "pre":
            raise ValueError(f"norm.place={self.norm.place} has no meaning in block=parallel. Use place=pre, or block=sequential.")
        return self


ModelConfig = DecoderConfig  # a union of stacks, by `kind`, once there are several


class Head(nn.Linear):
    """Hidden states to logits, soft-capped if asked."""

    def __init__(self, d_model: int, vocab_size: int, softcap: float | None) -> None:
        super().__init__(d_model, vocab_size, bias=False)
        self.softcap = softcap

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x, self.weight)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


Reader = Callable[[Tensor, Head, Context], Any]


class DecoderLM(nn.Module):
    """Token ids to logits. Parameter names are part of the checkpoint format."""

    def __init__(self, cfg: DecoderConfig) -> None:
        """cfg: with vocab_size and max_seq_len set."""
        super().__init__()
        assert cfg.vocab_size is not None and cfg.max_seq_len is not None
        self.cfg, self.vocab_size, self.max_seq_len = cfg, cfg.vocab_size, cfg.max_seq_len
        self.embed = nn.Embedding(self.vocab_size, cfg.d_model)
        self.position = build_position(cfg.position, cfg.d_model, cfg.attention.width(cfg.d_model), self.max_seq_len)
        self.dropout = nn.Dropout(cfg.dropout)
        parts = BlockParts(norm=cfg.norm, attention=cfg.attention, ffn=cfg.ffn, d_model=cfg.d_model, dropout=cfg.dropout)
        self.blocks = nn.ModuleList(build_block(cfg.block, parts, layer) for layer in range(cfg.n_layers))
        self.norm = nn.Identity() if cfg.norm.place == "post" else build_norm(cfg.norm, cfg.d_model)
        self.head = Head(cfg.d_model, self.vocab_size, cfg.head_softcap)
        self.tie()

    def tie(self) -> None:
        """Make the head the embedding again, where it should be; moving off the meta device separates them."""
        if self.cfg.tied_head:
            self.head.weight = self.embed.weight

    def forward(self, batch: Batch, loss: Reader | None = None, cache: Cache | None = None) -> Any:
        """Logits (b, s, v), or what `loss(hidden, head, context)` returns: a chunked loss, or a reader of the last position.

        With a cache the tokens continue what it holds, one document a row; positions default to the next ones.
        """
        if cache is not None and batch.documents is not None:
            raise ValueError("a cache holds one document a row, and batch.documents was given. Leave it out, or decode without a cache.")
        positions = batch.positions if batch.positions is not None else _next_positions(batch, cache)
        plain = batch.positions is None and batch.documents is None and cache is None
        mask = Mask(positions, positions, batch.documents, batch.documents, square=plain)
        ctx = Context(self.position, mask, self.position.angles(positions), cache)
        if cache is not None:
            cache.begin(positions)
        x = self.embed(batch.tokens)  # (b, s) -> (b, s, d)
        if self.cfg.embed_scale != 1.0:
            x = x * self.cfg.embed_scale
        x = self.dropout(self.position.embed(x, positions))
        for block in self.blocks:
            x = block(x, ctx)
        x = self.norm(x)
        return self.head(x) if loss is None else loss(x, self.head, ctx)

    def new_cache(self, batch: int, max_len: int, slack: int = 8) -> Cache:
        """An empty cache for `batch` rows of up to max_len tokens, on the model's device and in its dtype."""
        shapes = [self.cfg.attention.cache_shape(self.cfg.d_model, layer) for layer in range(self.cfg.n_layers)]
        return Cache(shapes, batch, max_len, self.embed.weight.device, self.embed.weight.dtype, slack)

    def matrices(self) -> set[str]:
        """Names of the blocks' 2-D weights, which Muon treats as matrices."""
        return {f"blocks.{name}" for name, p in self.blocks.named_parameters() if p.ndim == 2}


def _next_positions(batch: Batch, cache: Cache | None) -> Tensor:
    b, s = batch.tokens.shape
    positions = arange_positions(s, batch.tokens.device)
    return positions if cache is None else (positions + cache.length).expand(b, s)


def last_position(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
    """A reader: logits of the last position only, (b, v)."""
    logits: Tensor = head(hidden[:, -1])
    return logits


def build_model(cfg: ModelConfig, seed: int | None = None, device: torch.device | str = "cpu") -> DecoderLM:
    """The model of this config, built on the meta device first; weights drawn from `seed`, or left empty (None) to be loaded."""
    with torch.device("meta"):
        model = DecoderLM(cfg)
    if str(device) == "meta":
        return model
    model.to_empty(device=device)
    model.tie()
    if seed is not None:
        init_weights(model, cfg.init, cfg.n_layers, seed)
    return model
