"""Which experts tokens may go to, by groups and capacity, and how evenly they go.

Figures of a row count its own tokens only, so that padding it to the width of other rows changes nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.ops.precision import widest

Total = Callable[[Tensor], Tensor]
"""The sum over whole rows of what each rank has summed over its own tokens."""


def within_groups(scores: Tensor, n_groups: int, top_groups: int, counted: int) -> Tensor:
    """Returns scores with -inf outside of each token's best groups of neighbouring experts, (b, s, e).  counted: how many scores of a group
    are summed to rank it.

    DeepSeek-V2, arXiv:2405.04434, section 2.2.2 (1 score); DeepSeek-V3, arXiv:2412.19437, section 2.1.2 (2).
    """
    if top_groups == n_groups:
        return scores
    groups = scores.unflatten(-1, (n_groups, -1))  # (b, s, e) -> (b, s, groups, e/groups)
    best = groups.topk(min(counted, groups.shape[-1]), dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
    closed = torch.ones(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter(-1, best, False)
    return groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)


def capacity_of(real: Tensor, top_k: int, n_experts: int, factor: float) -> Tensor:
    """(b, 1) tokens that an expert takes of each row: ceil(factor * tokens * top_k / n_experts).

    Fedus et al. 2021, arXiv:2101.03961, eq. 3.  real: (b, s), False on padding.
    """
    return (real.sum(1, keepdim=True).to(widest(real.device)) * factor * top_k / n_experts).ceil()


def within_capacity(experts: Tensor, real: Tensor, n_experts: int, capacity: Tensor | int) -> Tensor:
    """1.0 where the expert still has room for this token of its row, (b, s, k); a row's first choices come before its second.

    experts: (b, s, k); real: (b, s), False on padding; capacity: tokens that an expert takes, of all rows or (b, 1).
    """
    k = experts.shape[-1]
    order = experts.transpose(1, 2).flatten(1)  # (b, s, k) -> (b, k*s)
    chosen = F.one_hot(order, n_experts) * real.repeat(1, k).unsqueeze(-1)  # (b, k*s, e)
    place = chosen.cumsum(1).gather(-1, order.unsqueeze(-1)).squeeze(-1)  # (b, k*s)
    return (place <= capacity).float().unflatten(1, (k, -1)).transpose(1, 2)  # (b, k*s) -> (b, s, k)


def loads(experts: Tensor, real: Tensor, n_experts: int) -> Tensor:
    """(b, e) how many of a row's choices go to each expert, padding left out, in float32.  experts: (b, s, k); real: (b, s)."""
    none = torch.zeros(*experts.shape[:-1], n_experts, device=experts.device, dtype=torch.float32)  # bf16 could not count to 257
    return (none.scatter(-1, experts, 1.0) * real.unsqueeze(-1)).sum(1)  # (b, s, e) -> (b, e)


def tokens(real: Tensor, total: Total) -> Tensor:
    """(b,) the number of tokens in each row, or 1 for a row of padding.  real: (b, s), False on padding."""
    return total(real.sum(1).float()).clamp_min(1)


def agreement(counts: Tensor, scores: Tensor, real: Tensor, n: Tensor, top_k: int, total: Total) -> Tensor:
    """(b,) sum_i f_i p_i of each row, f_i the part of choices that expert i gets and p_i its mean score; 1/e where all are alike.

    Fedus et al. 2021, arXiv:2101.03961, eqs. 4 to 6.  counts: (b, e) `loads`; scores: (b, s, e), summing to 1; n: `tokens`.
    """
    n, mean = n.unsqueeze(-1), total((scores * real.unsqueeze(-1)).sum(1)) / n.unsqueeze(-1)  # (b, s, e) -> (b, e)
    return (total(counts) / (n * top_k) * mean).sum(-1)


def squares_of_log_z(logits: Tensor, real: Tensor, total: Total) -> Tensor:
    """(b,) the sum of logsumexp^2 over each row's tokens.  Zoph et al. 2022, arXiv:2202.08906, eq. 5.  logits: (b, s, e); real: (b, s)."""
    return total((logits.logsumexp(-1).square() * real).sum(1))
