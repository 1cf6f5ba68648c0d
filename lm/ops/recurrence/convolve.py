"""A causal convolution over the last few tokens of a document, each channel with a kernel of its own."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.ops.attention.mask import Mask
from lm.ops.cache.cache import Cache


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
    return _sum_of_products(F.pad(u, (0, 0, before, 0)), kernel, u.shape[1], reach)


def convolved(u: Tensor, kernel: Tensor, mask: Mask, cache: Cache | None, layer: int) -> tuple[Tensor, Tensor]:
    """Returns the convolution behind what the cache holds of this layer, (b, s, d), and what it is to hold as in `continued`, nothing
    where there is none.  kernel: in any dtype."""
    kernel = kernel.to(u.dtype)
    return (fast(u, kernel, mask), u[:, :0]) if cache is None else continued(u, kernel, cache.state(layer)[0], mask, cache.slack)


def previous(u: Tensor, mask: Mask, cache: Cache | None, layer: int) -> tuple[Tensor, Tensor]:
    """Returns at each token the input of the one before it in its document, zeros at the first, (b, s, d); and what the cache is to hold,
    as in `convolved`."""
    return convolved(u, F.pad(u.new_ones(1, 1), (0, 1)), mask, cache, layer)


def continued(u: Tensor, kernel: Tensor, held: Tensor, mask: Mask, slack: int) -> tuple[Tensor, Tensor]:
    """Returns the convolution of a chunk behind cached tokens, (b, s, d), and the state of the cache (the last L-1 inputs) after each of
    the chunk's last tokens, (b, min(s, slack + 1), L-1, d).

    Padding is moved to the front, and all tokens behind it in order, so that no padding is between two tokens.  held: (b, L-1, d), the
    state before the chunk.
    """
    before, s, d = kernel.shape[1] - 1, *u.shape[1:]
    if not mask.padded:
        seen = torch.cat([held.to(u.dtype), u], dim=1)
        last = seen[:, -(min(s, slack + 1) + before) + 1 :]  # (b, min(s, slack + 1) + L-2, d)
        return _sum_of_products(seen, kernel, s), last.unfold(1, before, 1).transpose(-1, -2).contiguous()
    order, after = mask.once(("continued", before), lambda: _without_gaps(mask.q_positions.expand(len(u), -1), before, slack))
    seen = torch.cat([held.to(u.dtype), u], dim=1).gather(1, order.unsqueeze(-1).expand(-1, -1, d))  # (b, L-1+s, d)
    ends = seen.gather(1, after.flatten(1).unsqueeze(-1).expand(-1, -1, d)).unflatten(1, after.shape[1:])
    back = torch.zeros_like(seen).scatter(1, order[:, before:, None].expand(-1, -1, d), _sum_of_products(seen, kernel, s))
    return back[:, before:], ends


def _sum_of_products(seen: Tensor, kernel: Tensor, s: int, reach: list[Tensor] | None = None) -> Tensor:
    """A sum of L products: depthwise kernels are slower, and know no documents.  seen: (b, L-1+s, d); results are of the last s."""
    before = kernel.shape[1] - 1
    out = seen[:, before:] * kernel[:, before]
    for n in range(1, before + 1):
        term = seen[:, before - n : before - n + s] * kernel[:, before - n]
        out = out + (term if reach is None else term * reach[n - 1])
    return out


def _reach(mask: Mask, before: int) -> list[Tensor]:
    """For n = 1, 2, ... whether the token n places earlier is no padding, and of the same document, (b, s, 1) each."""
    at = torch.where(mask.q_positions >= 0, 0 if mask.q_documents is None else mask.q_documents.long(), -1)
    earlier = [F.pad(at, (n, 0), value=-1)[:, : at.shape[1]] for n in range(1, before + 1)]
    return [((then == at) & (then >= 0)).unsqueeze(-1) for then in earlier]


def _without_gaps(positions: Tensor, before: int, slack: int) -> tuple[Tensor, Tensor]:
    """Of the held tokens and then the chunk: the order with padding in front, (b, L-1+s); and the places in this order of the last L-1
    tokens after each of the last min(s, slack + 1) of the chunk, (b, min(s, slack + 1), L-1)."""
    real = F.pad(positions >= 0, (before, 0), value=True)
    ends = (~real).sum(1, keepdim=True) + real.cumsum(1)[:, before:][:, -(slack + 1) :]
    return real.long().argsort(dim=1, stable=True), ends.unsqueeze(-1) + torch.arange(-before, 0, device=real.device)
