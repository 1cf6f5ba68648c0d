"""Scores that fade by what lies between two tokens.  Lin et al. 2025, arXiv:2503.02130, section 3."""

import torch
from torch import Tensor

from lm.ops.attention.mask import Mask


def faded(gates: Tensor, mask: Mask) -> Tensor:
    """Returns sum_l gates_l over the tokens l behind a key and up to the query, a bias on scores of (b, h, q, k).

    gates: log forget gates of the keys' tokens, at most 0, (b, h, k), in float32 or wider. A query that sees a later key, as the paper's do
    not, has the sum over the tokens behind itself and up to the key. Between documents the numbers mean nothing.
    """
    if mask.cached:
        order, back, at = (each[:, None].expand(*gates.shape[:2], -1) for each in _places(mask))  # (b, n) -> (b, h, n)
        sums = gates.gather(-1, order).cumsum(-1)
        of_queries, of_keys = sums.gather(-1, at), sums.gather(-1, back)
    else:
        of_queries = of_keys = gates.cumsum(-1)
    bias = of_queries.unsqueeze(-1) - of_keys.unsqueeze(-2)  # (b, h, q, 1) - (b, h, 1, k)
    return bias if mask.causal and mask.k_prefix is None else -bias.abs()


def _places(mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Returns which slot of a cache has its n-th token, hidden ones first, (b, k); for each slot n, (b, k); and for each query, (b, q),
    whose own token is in the cache, the same; of padding any. What hidden slots hold is in all sums alike."""

    def build() -> tuple[Tensor, Tensor, Tensor]:
        k, (order, back) = mask.k_positions, mask.by_position()
        at = torch.searchsorted(k.gather(1, order), mask.q_positions.expand(len(k), -1).contiguous())
        return order, back, at.clamp_max(k.shape[1] - 1)

    return mask.once("places", build)
