"""Attention to a window and to the first tokens of a document.  Xiao et al. 2023, arXiv:2309.17453."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.nn.context import Context
from lm.nn.mixers.grouped import GQA, GroupedConfig
from lm.nn.norm import NormConfig
from lm.nn.position.base import Position
from lm.ops.attention.mask import Mask


class StreamingGQA(GQA):
    """Attention to a window and to a document's first tokens, as if these stood right before the window.

    Queries are rotated once for the window and once, no further than to `last`, for the first tokens. Numbering tokens by their place in
    the cache gives the same scores, but would rotate cached keys anew at each step.  Xiao et al. 2023, arXiv:2309.17453, section 3.2.
    """

    def __init__(self, cfg: GroupedConfig, norm: NormConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, norm, d_model, layer)
        self.last = self.how.first + (self.how.window or 0) - 1  # position of a query among the tokens that it sees

    def projected(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries twice, side by side (rotated for keys in the window, and for those of the first tokens), keys and values."""
        q, (k, v) = self.queries(x), self.keys_values(x)
        near = ctx.mask.once(
            ("angles", self.last), lambda: ctx.position.angles(ctx.mask.sharding.for_sublayer(ctx.mask.q_positions).clamp(max=self.last))
        )
        turned = [ctx.position.rotate(q, angles, self.layer) for angles in (ctx.angles, near)]
        return torch.cat(turned, -1), ctx.position.rotate(k, ctx.angles, self.layer), v

    def weighted(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, position: Position | None) -> Tensor:
        """Each key is zero in one half, and so meets the other half of a query. Values are padded to the same width for fused kernels."""
        first = mask.sharding.for_sublayer(self.is_first(mask.k_positions))[:, None, :, None]  # (b, k) -> (b, 1, k, 1)
        halves = torch.cat([k.masked_fill(first, 0.0), k.masked_fill(~first, 0.0)], -1)  # (b, g, k, c) -> (b, g, k, 2c)
        return super().weighted(q, halves, F.pad(v, (0, self.head_dim)), mask, position)[..., : self.head_dim]

    def bias(self, mask: Mask, position: Position | None) -> Tensor | None:
        far = super().bias(mask, position)
        if position is None or far is None:
            return None
        near = self.bias_of(position, mask.q_positions.clamp(max=self.last), mask, ("bias", self.last))
        return far if near is None else torch.where(self.is_first(mask.k_positions)[:, None, None], near, far)

    def is_first(self, positions: Tensor) -> Tensor:
        """Returns whether keys at these positions are of first tokens, seen beyond the window."""
        return positions < self.how.first
