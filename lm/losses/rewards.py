"""The loss of a reward model: of two answers to one prompt the better one is worth more."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.losses.cross_entropy import LossSums, mean_of, with_error


def bradley_terry(rewards: Tensor, centre: float = 0.0) -> LossSums:
    """-log sigmoid(r_better - r_other), summed over pairs.  Ouyang et al. 2022, arXiv:2203.02155, equation 1.

    rewards: (2 pairs,) of answers, the better one of each pair first.  centre: factor on (r_better + r_other)^2 beside, which keeps rewards
    around 0 (Eisenstein et al. 2023, arXiv:2312.09244, equation 3). Reports both rewards, the margin, how many margins are above 0, ties
    as half, and how many are not.
    """
    better, other = rewards[0::2], rewards[1::2]
    margin, n = better - other, len(better)
    nats = -F.logsigmoid(margin).sum()
    total = nats + centre * (better + other).square().sum() if centre else nats
    right = (1 + margin.detach().sign()).sum() / 2
    metrics = {"chosen_reward": mean_of(better.detach().sum(), n), "rejected_reward": mean_of(other.detach().sum(), n)}
    metrics |= {"margin": mean_of(margin.detach().sum(), n), "accuracy": mean_of(right, n)}
    return LossSums(total, nats.detach(), metrics=with_error(metrics))


def told_apart(rewards: Tensor) -> Tensor:
    """(pairs, 3): nats of each pair, the probability of the answer that is worth more, and whether it is the better one.  rewards: as in
    `bradley_terry`."""
    margin = rewards[0::2] - rewards[1::2]
    return torch.stack([-F.logsigmoid(margin), margin.abs().sigmoid(), (margin > 0).to(margin.dtype)], -1)
