"""A recurrence of one number per channel, which each token fades before it adds to it: h_t = fade_t h_(t-1) + new_t.

De et al. 2024, arXiv:2402.19427, section 2.4.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.ops.cache.cache import Cache


def reference(fade: Tensor, new: Tensor, state: Tensor) -> Tensor:
    """h_t = fade_t h_(t-1) + new_t, token by token.  fade, new: (b, s, w), fade of 0 .. 1; state: (b, w), h before the first."""
    out = []
    for t in range(new.shape[1]):
        state = fade[:, t] * state + new[:, t]
        out.append(state)
    return torch.stack(out, dim=1)


def chunked(fade: Tensor, new: Tensor, state: Tensor) -> Tensor:
    """The same in 2 sqrt(s) steps: token by token in all of sqrt(s) chunks at once, then from chunk to chunk. No factor is above 1."""
    s = new.shape[1]
    size = math.isqrt(s - 1) + 1
    n = -(-s // size)
    fades, news = (F.pad(x, (0, 0, 0, n * size - s)).unflatten(1, (n, size)).unbind(2) for x in (fade, new))  # (b, s, w) -> (b, n, w) each
    held, left = [news[0]], [fades[0]]
    for f, x in zip(fades[1:], news[1:], strict=True):
        held.append(f * held[-1] + x)
        left.append(f * left[-1])
    begun = [state]
    for kept, added in zip(left[-1].unbind(1)[:-1], held[-1].unbind(1)[:-1], strict=True):
        begun.append(kept * begun[-1] + added)
    before = torch.stack(begun, dim=1)
    return torch.stack([h + f * before for h, f in zip(held, left, strict=True)], dim=2).flatten(1, 2)[:, :s]


def continued(fade: Tensor, new: Tensor, ends: Tensor, cache: Cache | None, layer: int) -> Tensor:
    """Returns h behind what the cache holds of this layer, (b, s, w), and gives the cache, beside `ends`, h after the last tokens.
    ends: what the cache is to hold of the convolution, as `convolved` returns it."""
    if cache is None:
        return chunked(fade, new, torch.zeros_like(new[:, 0]))
    h = chunked(fade, new, cache.state(layer)[1].to(new.dtype))
    cache.advance(layer, ends, h[:, -ends.shape[1] :])
    return h
