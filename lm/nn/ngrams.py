"""Embeddings of the last few tokens together, looked up by hash and added to those of single tokens."""

from itertools import pairwise
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.context import Context
from lm.nn.init import Declares, zeros
from lm.nn.linear import Embedding
from lm.ops.cache.cache import Fixed
from lm.ops.recurrence.convolve import convolved
from lm.schema import MOST, Config

_PRIME = 1_000_000_007
_BASE, _DIGITS = 256, 3  # of a token's id, < 2^24, as numbers that any dtype of a cache holds exactly


class NGramsConfig(Config):
    """To each token's embedding are added those of the last two, three, ... tokens of its document, together (BLT: Pagnoni et al. 2024,
    arXiv:2412.09871, section 3.2.1; modded-nanogpt's of pairs)."""

    rows: int = Field(gt=1, le=MOST)
    """Rows of the table for each size; tokens find theirs by a hash, and some share one (BLT: 500,002; modded-nanogpt: 5 vocabularies)."""
    sizes: list[int] = Field([2], min_length=1)
    """Numbers of tokens that are looked up together, from 2 to 8 (BLT: 3 to 8, of bytes)."""

    @model_validator(mode="after")
    def _sizes_grow(self) -> Self:
        if self.sizes[0] < 2 or self.sizes[-1] > 8 or any(b <= a for a, b in pairwise(self.sizes)):
            raise ValueError(f"sizes={self.sizes}: they are to grow from 2 at least to 8 at most. Write sizes=[2,3], say.")
        return self

    def flops(self, d_model: int) -> int:
        """Returns the FLOPs of one token: those of the sums."""
        return len(self.sizes) * d_model


class Table(Declares, Embedding):
    """Rows that add nothing at first."""

    initializers = {"weight": zeros}


class NGrams(nn.Module):
    """x + sum_n table[n, (sum_i token_(t-n+1+i) p^i mod 2^64) mod rows], p = 1,000,000,007, with token 0 before a document begins."""

    def __init__(self, cfg: NGramsConfig, d_model: int, layer: int) -> None:
        """layer: the number under which a cache keeps the last tokens, behind those of all layers."""
        super().__init__()
        self.sizes, self.rows, self.layer = cfg.sizes, cfg.rows, layer
        self.table = Table(len(cfg.sizes) * cfg.rows, d_model)

    def state(self) -> Fixed:
        """Returns what a cache keeps of a row: the digits of its last tokens."""
        back = self.sizes[-1] - 1
        return Fixed(((back, back * _DIGITS),))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """(b, s, d) -> (b, s, d)."""
        assert ctx.tokens is not None
        earlier = self._earlier(ctx.tokens, ctx, x.dtype).unbind(-1)
        hashed, found = ctx.tokens, list[Tensor]()
        for size, before in enumerate(earlier, 2):
            hashed = hashed * _PRIME + before
            if size in self.sizes:
                found.append(hashed % self.rows + len(found) * self.rows)
        return x + self.table(torch.stack(found, dim=-1)).sum(-2)  # (b, s, sizes, d) -> (b, s, d)

    def _earlier(self, tokens: Tensor, ctx: Context, dtype: torch.dtype) -> Tensor:
        """Returns the tokens before each, the last one first, and 0 where there is none, (b, s, largest size - 1)."""
        back = self.sizes[-1] - 1
        digits = torch.stack([tokens // _BASE**n % _BASE for n in reversed(range(_DIGITS))], dim=-1).to(dtype)
        pick = F.pad(torch.eye(back, device=tokens.device, dtype=dtype).flip(0), (0, 1))  # row i: the token i + 1 before, none of itself
        pick = pick.repeat_interleave(_DIGITS, dim=0)  # (back * digits, back + 1)
        seen, after = convolved(digits.repeat(1, 1, back), pick, ctx.mask, ctx.cache, self.layer)
        if ctx.cache is not None:
            ctx.cache.advance(self.layer, after)
        high, middle, low = seen.long().unflatten(-1, (back, _DIGITS)).unbind(-1)
        return (high * _BASE + middle) * _BASE + low

    def extra_repr(self) -> str:
        return f"{self.rows} rows for each of {self.sizes} tokens"
