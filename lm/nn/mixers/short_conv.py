"""A gated convolution over the last few tokens, with which LFM2 mixes most of its layers.  Liquid AI 2025, arXiv:2511.23404."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.context import Context
from lm.nn.cost.kept import Kept
from lm.nn.init import Draw, by_inputs
from lm.nn.linear import Out
from lm.nn.mixers.base import Mixer, RecurrentConfig
from lm.nn.mixers.cache import Cache, Fixed
from lm.nn.mixers.mask import Mask
from lm.nn.norm import NormConfig
from lm.schema import MOST


class ShortConvConfig(RecurrentConfig):
    """Each channel mixes its last few tokens: o(c * conv(b * v)), where b, c and v are projections of the input."""

    kind: Literal["short_conv"] = "short_conv"
    kernel: int = Field(3, gt=1, le=MOST)
    """Tokens that a token sees, itself included (LFM2: 3)."""

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return ShortConv(self, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        return 2 * self.kernel * d_model

    def keeps(self, d_model: int, layer: int) -> Kept:
        """The three projections, what is convolved, the result, and that times c."""
        return Kept(0, 6 * d_model)

    def state(self, d_model: int, layer: int) -> Fixed:
        """What was convolved of the last tokens."""
        return Fixed(((self.kernel - 1, d_model),))


class ShortConv(Mixer):
    """o(c * conv(b * v)), with a kernel of its own for each channel."""

    drawn: ClassVar[Mapping[str, Draw]] = {"kernel": by_inputs}

    def __init__(self, cfg: ShortConvConfig, d_model: int, layer: int) -> None:
        super().__init__(layer)
        self.bcv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.n_tokens = cfg.kernel
        self.kernel = nn.Parameter(torch.empty(d_model, cfg.kernel))
        self.o = Out(d_model, d_model, bias=False)

    def extra_repr(self) -> str:
        return f"of {self.n_tokens} tokens"

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        if ctx.mask.explicit is not None or not ctx.mask.causal:
            raise ValueError("recurrent=short_conv reads from left to right, and knows no other mask. Use attention for it.")
        b, c, v = self.bcv(x).chunk(3, dim=-1)  # (b, s, 3d) -> (b, s, d) each
        u, kernel = b * v, self.kernel.to(b.dtype)
        mixed = fast(u, kernel, ctx.mask) if ctx.cache is None else self._continued(u, kernel, ctx.mask, ctx.cache)
        out: Tensor = self.o(c * mixed)
        return out

    def _continued(self, u: Tensor, kernel: Tensor, mask: Mask, cache: Cache) -> Tensor:
        """Padding goes to the front of what is seen, the rest behind it in order, so that no padding is between two tokens."""
        before, s, d = kernel.shape[1] - 1, *u.shape[1:]
        [held] = cache.state(self.layer)
        order, after = mask.once(("continued", before), lambda: _without_gaps(mask.q_positions.expand(len(u), -1), before, cache.slack))
        seen = torch.cat([held.to(u.dtype), u], dim=1).gather(1, order.unsqueeze(-1).expand(-1, -1, d))  # (b, L-1+s, d)
        cache.advance(self.layer, seen.gather(1, after.flatten(1).unsqueeze(-1).expand(-1, -1, d)).unflatten(1, after.shape[1:]))
        back = torch.zeros_like(seen).scatter(1, order[:, before:, None].expand(-1, -1, d), _convolved(seen, kernel, s))
        return back[:, before:]


def reference(u: Tensor, kernel: Tensor, mask: Mask) -> Tensor:
    """y_t = sum_i kernel_i u_(t - L + 1 + i), token by token, of the last L tokens of its document.  u: (b, s, d); kernel: (d, L)."""
    out = torch.zeros_like(u)
    for row, positions in enumerate(mask.q_positions.expand(len(u), -1).tolist()):
        documents = positions if mask.q_documents is None else mask.q_documents.expand(len(u), -1)[row].tolist()
        last = [torch.zeros_like(u[row, 0])] * kernel.shape[1]
        for t, position in enumerate(positions):
            if position < 0:
                continue
            if mask.q_documents is not None and t and documents[t] != documents[t - 1]:
                last = [torch.zeros_like(u[row, 0])] * kernel.shape[1]
            last = [*last[1:], u[row, t]]
            out[row, t] = (torch.stack(last, dim=-1) * kernel).sum(-1)
    return out


def fast(u: Tensor, kernel: Tensor, mask: Mask) -> Tensor:
    """The same for all tokens at once; padding stands before or behind the tokens of a document, not between them."""
    before = kernel.shape[1] - 1
    reach = None if mask.square else mask.once(("reach", before), lambda: _reach(mask, before))
    return _convolved(F.pad(u, (0, 0, before, 0)), kernel, u.shape[1], reach)


def _convolved(seen: Tensor, kernel: Tensor, s: int, reach: list[Tensor] | None = None) -> Tensor:
    """A sum of L products: depthwise kernels are slower, and know no documents.  seen: (b, L-1+s, d), of which the last s have results."""
    before = kernel.shape[1] - 1
    out = seen[:, before:] * kernel[:, before]
    for n in range(1, before + 1):
        term = seen[:, before - n : before - n + s] * kernel[:, before - n]
        out = out + (term if reach is None else term * reach[n - 1])
    return out


def _reach(mask: Mask, before: int) -> list[Tensor]:
    """For n = 1, 2, ... whether the token n places earlier is one, and of the same document, (b, s, 1) each."""
    at = torch.where(mask.q_positions >= 0, 0 if mask.q_documents is None else mask.q_documents.long(), -1)
    earlier = [F.pad(at, (n, 0), value=-1)[:, : at.shape[1]] for n in range(1, before + 1)]
    return [((then == at) & (then >= 0)).unsqueeze(-1) for then in earlier]


def _without_gaps(positions: Tensor, before: int, slack: int) -> tuple[Tensor, Tensor]:
    """Of the held tokens and the chunk: the order with padding in front, (b, L-1+s); therein the L - 1 last tokens as they are after each
    of the last min(s, slack + 1) of the chunk, (b, min(s, slack + 1), L-1)."""
    real = F.pad(positions >= 0, (before, 0), value=True)
    ends = (~real).sum(1, keepdim=True) + real.cumsum(1)[:, before:][:, -(slack + 1) :]
    return real.long().argsort(dim=1, stable=True), ends.unsqueeze(-1) + torch.arange(-before, 0, device=real.device)
