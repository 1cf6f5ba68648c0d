"""What every model is made of: a stack of blocks between embedded tokens and the last norm."""

from typing import Any, Self

from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm.config import Config, Slot
from lm.errors import ConfigError
from lm.nn.block import BlockParts, ParallelConfig, SequentialConfig, build_block
from lm.nn.context import Context
from lm.nn.ffn.moe import MoEConfig
from lm.nn.head import HeadConfig
from lm.nn.init import InitConfig
from lm.nn.mixers.mla import MLAConfig
from lm.nn.position.base import Dims, build_position
from lm.nn.position.rope import RopeConfig
from lm.nn.slots import AttentionConfig, BlockConfig, FFNConfig, NormConfig, PositionConfig


class EmbedConfig(Config):
    """From token ids to the residual stream."""

    scale: float = Field(1.0, gt=0)
    """Factor on token embeddings (sqrt(d_model) in Vaswani et al. and Gemma)."""
    norm: bool = False
    """A norm follows (BERT, BART, BLOOM)."""
    segments: int | None = Field(None, gt=0)
    """Learned vectors for this many segments are added (BERT). null: none."""


class ModelConfig(Slot):
    """What all models are configured by."""

    vocab_size: int | None = Field(None, gt=0)
    """Rows of the embedding. null: the tokenizer's size, rounded up to a multiple of 64."""
    max_seq_len: int | None = Field(None, gt=0)
    """Longest sequence. null: data.seq_len."""
    d_model: int = Field(gt=0)
    """Width of the residual stream."""
    n_layers: int = Field(gt=0)
    """Number of blocks; of an encoder-decoder, the decoder's."""
    norm: NormConfig
    position: PositionConfig
    attention: AttentionConfig
    ffn: FFNConfig
    block: BlockConfig = SequentialConfig()
    embed: EmbedConfig = EmbedConfig()
    head: HeadConfig = HeadConfig()
    init: InitConfig = InitConfig()
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an element of the embedding or of a sublayer's output."""

    @model_validator(mode="after")
    def _slots_fit(self) -> Self:
        a = self.attention
        if not isinstance(a, MLAConfig) and a.head_dim is None and self.d_model % a.n_heads:
            raise ValueError(f"d_model={self.d_model} is not a multiple of n_heads={a.n_heads}. Change one, or set head_dim.")
        if isinstance(self.position, RopeConfig):
            self.position.rotary_dim(a.rotary_width(self.d_model))
        elif isinstance(a, MLAConfig):
            raise ValueError(f"attention=mla keeps {a.rope_dim} dimensions for rotation, and position={self.position.kind} does not rotate."
                             " Use position=rope, or another attention.")  # fmt: skip
        if isinstance(self.block, ParallelConfig) and self.norm.place != "pre":
            raise ValueError(f"norm.place={self.norm.place} has no meaning in block=parallel. Use place=pre, or block=sequential.")
        if isinstance(self.ffn, MoEConfig) and all(self.ffn.is_dense(layer) for layer in range(self.n_layers)):
            raise ValueError(f"ffn.first_dense={self.ffn.first_dense} and ffn.every={self.ffn.every} leave no layer of {self.n_layers} with"
                             " experts. Lower them, or use ffn=mlp.")  # fmt: skip
        return self

    def parts(self) -> BlockParts:
        """What fills a block."""
        return BlockParts(self.norm, self.attention, self.ffn, self.d_model, self.dropout)

    def dims(self, causal: bool) -> Dims:
        """For the positions of a stack."""
        assert self.max_seq_len is not None
        return Dims(self.d_model, self.attention.n_heads, self.attention.rotary_width(self.d_model), self.max_seq_len, causal)


class Stack(nn.Module):
    """Position, blocks and last norm. Parameter names are part of the checkpoint format."""

    checkpoint_every = 0  # every n-th block keeps its input only, and is computed again in the backward; 0: none

    def __init__(self, cfg: ModelConfig, n_layers: int, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.embed_scale = cfg.embed.scale
        self.position = build_position(cfg.position, cfg.dims(causal))
        self.segment = nn.Embedding(cfg.embed.segments, cfg.d_model) if cfg.embed.segments else None
        self.embed_norm = cfg.norm.build(cfg.d_model) if cfg.embed.norm else None
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(build_block(cfg.block, cfg.parts(), layer, cross) for layer in range(n_layers))
        self.norm = nn.Identity() if cfg.norm.place == "post" else cfg.norm.build(cfg.d_model)

    def embedded(self, x: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
        """What the first block gets.  x: token embeddings, (b, s, d)."""
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        if self.segment is not None:
            x = x + (self.segment.weight[0] if segments is None else self.segment(segments))
        elif segments is not None:
            raise ConfigError("batch.segments was given, and model.embed.segments is null. Leave them out, or use a model that has some.")
        x = self.position.embed(x, positions)
        return self.dropout(x if self.embed_norm is None else self.embed_norm(x))

    def through_blocks(self, x: Tensor, ctx: Context) -> Tensor:
        """(b, s, d) -> (b, s, d), before the last norm."""
        for layer, block in enumerate(self.blocks):
            x = self.through(block, layer, x, ctx)
        return x

    def through(self, block: nn.Module, layer: int, *inputs: Any) -> Tensor:
        """What a block gives, computed again in the backward if it is one of every n-th."""
        again = self.training and self.checkpoint_every and layer % self.checkpoint_every == 0
        out: Tensor = checkpoint(block, *inputs, use_reentrant=False) if again else block(*inputs)
        return out
