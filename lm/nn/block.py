"""One layer: attention and feed-forward, one after the other or side by side."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from lm.config import Config
from lm.nn.attention import GQAConfig, build_attention
from lm.nn.context import Context
from lm.nn.ffn import MLPConfig, build_ffn
from lm.nn.norm import LayerNormConfig, RMSNormConfig, build_norm, build_residual


class SequentialConfig(Config):
    """Attention, then feed-forward, each with its own residual."""

    kind: Literal["sequential"] = "sequential"


class ParallelConfig(Config):
    """Attention and feed-forward side by side on one residual (GPT-J, PaLM: one norm; GPT-NeoX: two)."""

    kind: Literal["parallel"] = "parallel"
    shared_norm: bool = True
    """Both read the same normalised input; false gives each a norm of its own."""


@dataclass(frozen=True)
class BlockParts:
    """The slots that fill a block, as its parent hands them down."""

    norm: RMSNormConfig | LayerNormConfig
    attention: GQAConfig
    ffn: MLPConfig
    d_model: int
    dropout: float


class Block(nn.Module):
    """x = residual(x, attention); x = residual(x, ffn)."""

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__()
        self.attention = build_attention(parts.attention, parts.norm, parts.d_model, layer)
        self.ffn = build_ffn(parts.ffn, parts.d_model, layer)
        self.attention_residual = build_residual(parts.norm, parts.d_model, parts.dropout)
        self.ffn_residual = build_residual(parts.norm, parts.d_model, parts.dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = self.attention_residual(x, lambda h: self.attention(h, ctx))
        return self.ffn_residual(x, lambda h: self.ffn(h, ctx))


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + ffn(norm(x)).  Wang & Komatsuzaki 2021 (GPT-J); Chowdhery et al. 2022, arXiv:2204.02311, section 2."""

    def __init__(self, parts: BlockParts, layer: int, shared_norm: bool) -> None:
        super().__init__()
        self.attention = build_attention(parts.attention, parts.norm, parts.d_model, layer)
        self.ffn = build_ffn(parts.ffn, parts.d_model, layer)
        self.attention_norm = build_norm(parts.norm, parts.d_model)
        self.ffn_norm = None if shared_norm else build_norm(parts.norm, parts.d_model)
        self.dropout = nn.Dropout(parts.dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        h = self.attention_norm(x)
        g = h if self.ffn_norm is None else self.ffn_norm(x)
        return x + self.dropout(self.attention(h, ctx) + self.ffn(g, ctx))


def build_block(cfg: SequentialConfig | ParallelConfig, parts: BlockParts, layer: int) -> nn.Module:
    """Layer number `layer`, counted from 0."""
    if isinstance(cfg, ParallelConfig):
        return ParallelBlock(parts, layer, cfg.shared_norm)
    return Block(parts, layer)
