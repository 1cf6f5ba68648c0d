"""Keys that a small attention chooses for a large one.  DeepSeek-V3.2, arXiv:2512.02556, section 2.1."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.ops.attention.mask import Mask
from lm.ops.precision import wide, without_autocast

SMALLEST = 1e-9  # what a probability counts as at least, in a logarithm


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """sum_h weights_h relu(q_h k^T) in float32 or wider, (b, q, k).  q: (b, h, q, c); k: (b, 1, k, c); weights: (b, q, h)."""
    b, h, s, _ = q.shape
    with without_autocast(q.device):
        queries = wide(q).transpose(1, 2).flatten(1, 2)  # (b, h, q, c) -> (b, q*h, c): heads side by side, as they are summed
        each = F.relu(queries @ wide(k).squeeze(1).transpose(-1, -2)).view(b, s, h, -1)  # (b, q, h, k)
        return (wide(weights).unsqueeze(-2) @ each).squeeze(-2)  # (b, q, 1, h) @ (b, q, h, k) -> (b, q, k)


def best(scores: Tensor, seen: Tensor, n: int, mask: Mask) -> Tensor:
    """True at the n best keys that each query sees, all of them where it sees no more, (b, q, k); of equal ones those of the last tokens,
    wherever a cache has them.  scores, seen: (b, q, k)."""
    if n >= scores.shape[-1]:
        return seen
    scores = scores.masked_fill(~seen, float("-inf"))
    least = scores.topk(n, dim=-1).values[..., -1:]
    above, level = scores > least, scores == least
    room = n - above.sum(-1, keepdim=True)
    return seen & (above | (level & (_from_here_on(level, mask) <= room)))


def _from_here_on(level: Tensor, mask: Mask) -> Tensor:
    """Returns for each key how many of these there are, itself and those of later tokens, (b, q, k)."""
    if not mask.cached:
        return level.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
    order, back = (each[:, None].expand(level.shape) for each in mask.by_position())
    return level.gather(-1, order).flip(-1).cumsum(-1, dtype=torch.int32).flip(-1).gather(-1, back)


def rows_of(x: Tensor, at: Tensor) -> Tensor:
    """Returns the keys or values of these slots, (b, g, k, c) and (b, n) -> (b, g, n, c)."""
    return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def log_chances(scores: Tensor, shown: Tensor) -> Tensor:
    """log softmax of the scores of the keys that are shown, (b, q, k); finite everywhere, for the gradients of queries that see none."""
    return scores.masked_fill(~shown, torch.finfo(scores.dtype).min).log_softmax(-1)


def mean_divergence(read: Tensor, chances: Tensor, real: Tensor) -> Tensor:
    """KL(read || chances), the mean over a row's real queries, (b,).

    read: (b, q, k), what a query reads of each key in any unit; chances: (b, q, k), their logarithm; real: (b or 1, q).
    """
    read = read / read.sum(-1, keepdim=True).clamp_min(SMALLEST)
    apart = (torch.xlogy(read, read) - read * chances).sum(-1)  # (b, q, k) -> (b, q)
    return apart.masked_fill(~real, 0.0).sum(-1) / real.sum(-1).clamp_min(1)
