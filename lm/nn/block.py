"""One layer: attention and feed-forward, one after the other or side by side; in decoders with a source, cross-attention between."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from lm.config import Slot
from lm.nn.context import Context
from lm.nn.ffn.base import FFNConfig
from lm.nn.ffn.moe import build_ffn
from lm.nn.mixers.base import AttentionConfig
from lm.nn.mixers.gqa import GQA, CrossAttention, GQAConfig
from lm.nn.mixers.mla import MLA, MLAConfig
from lm.nn.norm import Branch, NormConfig, build_residual


class BlockConfig(Slot, group="model/block"):
    """How the sublayers of a layer stand to each other."""


class SequentialConfig(BlockConfig):
    """Attention, then feed-forward, each with its own residual."""

    kind: Literal["sequential"] = "sequential"
    residual_scale: float = Field(1.0, gt=0)
    """Factor on what each sublayer adds to the residual stream (Granite)."""


class ParallelConfig(BlockConfig):
    """Attention and feed-forward side by side on one residual (GPT-J, PaLM: one norm; GPT-NeoX: two)."""

    kind: Literal["parallel"] = "parallel"
    shared_norm: bool = True
    """Both read the same normalised input; false gives each a norm of its own (GPT-NeoX)."""


@dataclass(frozen=True)
class BlockParts:
    """The slots that fill a block, as its parent hands them down."""

    norm: NormConfig
    attention: AttentionConfig
    ffn: FFNConfig
    d_model: int
    dropout: float


class Block(nn.Module):
    """x = residual(x, attention); x = residual(x, ffn)."""

    def __init__(self, cfg: SequentialConfig, parts: BlockParts, layer: int) -> None:
        super().__init__()
        self.attention = build_attention(parts.attention, parts.norm, parts.d_model, layer)
        self.ffn = build_ffn(parts.ffn, parts.d_model, layer)
        self.attention_residual = build_residual(parts.norm, parts.d_model, parts.dropout, cfg.residual_scale)
        self.ffn_residual = build_residual(parts.norm, parts.d_model, parts.dropout, cfg.residual_scale)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = self.attention_residual(x, lambda h: self.attention(h, ctx))
        return self.ffn_residual(x, lambda h: self.ffn(h, ctx))


class CrossBlock(Block):
    """A block that reads a source between attention and feed-forward.  Vaswani et al. 2017, arXiv:1706.03762, section 3.1."""

    def __init__(self, cfg: SequentialConfig, parts: BlockParts, layer: int) -> None:
        super().__init__(cfg, parts, layer)
        assert isinstance(parts.attention, GQAConfig)
        self.cross = CrossAttention(parts.attention, parts.norm, parts.d_model, layer)
        self.cross_residual = build_residual(parts.norm, parts.d_model, parts.dropout, cfg.residual_scale)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = self.attention_residual(x, lambda h: self.attention(h, ctx))
        x = self.cross_residual(x, lambda h: self.cross(h, ctx))
        return self.ffn_residual(x, lambda h: self.ffn(h, ctx))


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + ffn(norm(x)).  Wang & Komatsuzaki 2021 (GPT-J); Chowdhery et al. 2022, arXiv:2204.02311, section 2."""

    def __init__(self, cfg: ParallelConfig, parts: BlockParts, layer: int) -> None:
        super().__init__()
        self.attention = build_attention(parts.attention, parts.norm, parts.d_model, layer)
        self.ffn = build_ffn(parts.ffn, parts.d_model, layer)
        self.attention_norm = parts.norm.build(parts.d_model)
        self.ffn_norm = None if cfg.shared_norm else parts.norm.build(parts.d_model)
        self.branch = Branch(parts.dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        h = self.attention_norm(x)
        g = h if self.ffn_norm is None else self.ffn_norm(x)
        return x + self.branch(self.attention(h, ctx) + self.ffn(g, ctx))


def build_attention(cfg: GQAConfig | MLAConfig, norm: NormConfig, d_model: int, layer: int) -> GQA | MLA:
    """The self-attention of this kind."""
    return MLA(cfg, d_model, layer) if isinstance(cfg, MLAConfig) else GQA(cfg, norm, d_model, layer)


def build_block(cfg: SequentialConfig | ParallelConfig, parts: BlockParts, layer: int, cross: bool = False) -> nn.Module:
    """Layer number `layer`, counted from 0; `cross`: with cross-attention."""
    if isinstance(cfg, ParallelConfig):
        return ParallelBlock(cfg, parts, layer)
    return CrossBlock(cfg, parts, layer) if cross else Block(cfg, parts, layer)
