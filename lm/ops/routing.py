"""Which of their best experts tokens may go to, and how evenly they go."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def within_groups(scores: Tensor, n_groups: int, best: int, counted: int) -> Tensor:
    """-inf outside of each token's best groups of neighbouring experts, (b, s, e).  counted: scores of a group that are summed."""
    if best == n_groups:
        return scores
    groups = scores.unflatten(-1, (n_groups, -1))  # (b, s, e) -> (b, s, groups, e/groups)
    chosen = groups.topk(min(counted, groups.shape[-1]), dim=-1).values.sum(-1).topk(best, dim=-1).indices
    closed = torch.ones(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter(-1, chosen, False)
    return groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)


def even_share(real: Tensor, k: int, e: int, factor: float) -> Tensor:
    """(b, 1) so many times the choices of an expert where all e have as many, of a row's own tokens: how wide others make the batch changes
    nothing.  real: (b, s), False on padding; k: choices of a token."""
    return (real.sum(1, keepdim=True).double() * factor * k / e).ceil()


def within_capacity(experts: Tensor, real: Tensor, e: int, capacity: Tensor | int) -> Tensor:
    """1.0 where the expert still has room for this token of its row, (b, s, k); a row's first choices come before its second."""
    k = experts.shape[-1]
    order = experts.transpose(1, 2).flatten(1)  # (b, s, k) -> (b, k*s)
    chosen = F.one_hot(order, e) * real.repeat(1, k).unsqueeze(-1)  # (b, k*s, e)
    place = chosen.cumsum(1).gather(-1, order.unsqueeze(-1)).squeeze(-1)  # (b, k*s)
    return (place <= capacity).float().unflatten(1, (k, -1)).transpose(1, 2)  # (b, k*s) -> (b, s, k)


Total = Callable[[Tensor], Tensor]
"""The sum over whole rows of what each rank has summed over its own tokens."""


def loads(experts: Tensor, real: Tensor, e: int) -> Tensor:
    """(b, e) how many of a row's choices go to each expert, those of padding left out."""
    choices = torch.zeros(*experts.shape[:-1], e, device=experts.device).scatter(-1, experts, 1.0)  # (b, s, k) -> (b, s, e)
    return (choices * real.unsqueeze(-1)).sum(1)


def agreement(counts: Tensor, probabilities: Tensor, real: Tensor, k: int, total: Total) -> Tensor:
    """(b,) sum_i f_i p_i of each row, f_i the part of its choices and p_i the mean score of expert i; 1/e where all are alike.

    Fedus et al. 2021, arXiv:2101.03961, eqs. 4 to 6.  counts: `loads`; probabilities: (b, s, e).
    """
    n, scores = _tokens(real, total), total((probabilities * real.unsqueeze(-1)).sum(1))  # (b, s, e) -> (b, e)
    return (total(counts) / (n * k) * (scores / n)).sum(-1)


def mean_square_log_z(logits: Tensor, real: Tensor, total: Total) -> Tensor:
    """(b,) of each row.  Zoph et al. 2022, arXiv:2202.08906, eq. 5.  logits: (b, s, e)."""
    return total((logits.logsumexp(-1).square() * real).sum(1)) / _tokens(real, total).squeeze(-1)


def _tokens(real: Tensor, total: Total) -> Tensor:
    return total(real.sum(1, keepdim=True).float()).clamp_min(1)  # (b, s) -> (b, 1)
