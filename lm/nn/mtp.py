"""Multi-token prediction: further blocks, one after another, predict more tokens.  DeepSeek-V3, arXiv:2412.19437, section 2.2."""

import torch
from pydantic import Field
from torch import Tensor, nn

from lm.nn.block_base import BlockConfig
from lm.nn.context import Context
from lm.nn.linear import Linear
from lm.nn.parts import BlockParts
from lm.schema import MOST_LAYERS, Config


class MTPConfig(Config):
    """Blocks beyond the last layer that are trained with the model, and draft where text is generated with draft=mtp."""

    depth: int = Field(gt=0, le=MOST_LAYERS)
    """Further tokens to predict."""
    weight: float = Field(0.3, gt=0)
    """Factor on the mean of their losses."""


class MTPBlock(nn.Module):
    """The n-th: norm(block(W [norm(embedding of the token n later), norm(hidden)])), hidden states for the shared head and the next block.

    The first one reads the hidden states behind the model's last norm, which the head reads too, as in transformers and SGLang.
    """

    def __init__(self, cfg: BlockConfig, parts: BlockParts) -> None:
        super().__init__()
        self.token_norm = parts.norm.build(parts.d_model)
        self.hidden_norm = parts.norm.build(parts.d_model)
        self.join = Linear(2 * parts.d_model, parts.d_model, bias=False)
        self.block = cfg.build(parts)
        self.norm = parts.norm.build(parts.d_model)

    def forward(self, hidden: Tensor, embedded: Tensor, ctx: Context) -> Tensor:
        """hidden, embedded: (b, s, d)."""
        joined = torch.cat([self.token_norm(embedded), self.hidden_norm(hidden)], dim=-1)  # (b, s, 2d)
        out: Tensor = self.norm(self.block(self.join(joined), ctx))
        return out


def shifted(x: Tensor, n: int, fill: int) -> Tensor:
    """Returns x[:, i + n] at place i, and `fill` at the last n places.  x: (b, s)."""
    out = torch.full_like(x, fill)
    if n < x.shape[1]:
        out[:, : x.shape[1] - n] = x[:, n:]
    return out
