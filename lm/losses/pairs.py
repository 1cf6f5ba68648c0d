"""Losses over pairs of answers to one prompt, the better one first, from the log-likelihoods of both."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.losses.cross_entropy import LossSums, mean_of


class PairLoss(ABC):
    """compare(better, other) + beside, summed over pairs; better, other: what each answer is worth."""

    beta: float
    needs_start: ClassVar[bool] = False
    unit: ClassVar[str] = "nats/pair"

    @abstractmethod
    def worth(self, after: Tensor, before: Tensor | None, lengths: Tensor) -> Tensor:
        """(2 pairs,) the worth of each answer, its implicit reward.

        after, before: (2 pairs,) log-likelihoods under the model and under the one that training started from; lengths: (2 pairs,) tokens.
        """

    def margin(self, better: Tensor, other: Tensor) -> Tensor:
        """(pairs,) by how much the better answers are worth more."""
        return self.beta * (better - other)

    def compare(self, better: Tensor, other: Tensor) -> Tensor:
        """(pairs,) the loss of each pair.  better, other: (pairs,)."""
        return -F.logsigmoid(self.margin(better, other))

    def beside(self, after: Tensor, lengths: Tensor) -> Tensor:
        """(pairs,) a further loss of each pair."""
        return after.new_zeros(len(after) // 2)

    def __call__(self, after: Tensor, before: Tensor | None, lengths: Tensor) -> LossSums:
        """Reports both likelihoods, the margin, and how many are above 0, ties as half; likelihoods only where `before` is missing."""
        seen = after.detach()
        n = len(seen) // 2
        metrics = {"chosen_logp": mean_of(seen[0::2].sum(), n), "rejected_logp": mean_of(seen[1::2].sum(), n)}
        if before is None and self.needs_start:
            return LossSums(after.new_zeros(()), after.new_zeros(()), metrics=metrics)
        worth = self.worth(after, before, lengths)
        better, other = worth[0::2], worth[1::2]
        total, found = (self.compare(better, other) + self.beside(after, lengths)).sum(), self.margin(better, other).detach()
        metrics |= {"margin": mean_of(found.sum(), n), "accuracy": mean_of((1 + found.sign()).sum() / 2, n)}
        return LossSums(total, total.detach(), metrics=metrics)


class _FromStart(PairLoss):
    """An answer is worth log(p / p_start), p_start under the model that training started from."""

    needs_start = True

    def worth(self, after: Tensor, before: Tensor | None, lengths: Tensor) -> Tensor:
        assert before is not None
        return after - before


@dataclass
class DPOLoss(_FromStart):
    """-log sigmoid(margin).  Rafailov et al. 2023, arXiv:2305.18290, equation 7.

    smoothing: the probability that a pair is the wrong way round (conservative DPO; Mitchell 2023).  sft: of the better answer's mean nats,
    which are minimised too (Pang et al. 2024, arXiv:2404.19733, equation 2).
    """

    beta: float
    smoothing: float = 0.0
    sft: float = 0.0

    def compare(self, better: Tensor, other: Tensor) -> Tensor:
        margin = self.margin(better, other)
        return -(1 - self.smoothing) * F.logsigmoid(margin) - self.smoothing * F.logsigmoid(-margin)

    def beside(self, after: Tensor, lengths: Tensor) -> Tensor:
        return self.sft * _mean_nats(after, lengths)


@dataclass
class IPOLoss(_FromStart):
    """The gain of the better answer over the other is drawn to 1 / (2 beta).  Azar et al. 2023, arXiv:2310.12036, equation 17; of means
    over tokens, so that long answers count as short ones do."""

    unit = "squared nats/token"
    beta: float

    def worth(self, after: Tensor, before: Tensor | None, lengths: Tensor) -> Tensor:
        return super().worth(after, before, lengths) / lengths

    def compare(self, better: Tensor, other: Tensor) -> Tensor:
        return ((self.margin(better, other) - 0.5) / self.beta).square()  # (gain - 1 / (2 beta))^2


@dataclass
class APOLoss(_FromStart):
    """The better answer is to gain and the other to lose, each by itself; down: both are to lose, and the other more.  D'Oosterlinck et
    al. 2024, arXiv:2408.06266, APO-zero and APO-down.  Between 0 and 2."""

    unit = "per pair"
    beta: float
    down: bool = False

    def compare(self, better: Tensor, other: Tensor) -> Tensor:
        if self.down:
            return (self.beta * better).sigmoid() + (-self.margin(better, other)).sigmoid()
        return (-self.beta * better).sigmoid() + (self.beta * other).sigmoid()


@dataclass
class SimPOLoss(PairLoss):
    """An answer is worth the mean of log p of its tokens, and the margin is compared with `least`.  Meng et al. 2024, arXiv:2405.14734,
    equation 6."""

    beta: float
    least: float

    def worth(self, after: Tensor, before: Tensor | None, lengths: Tensor) -> Tensor:
        return after / lengths

    def compare(self, better: Tensor, other: Tensor) -> Tensor:
        return -F.logsigmoid(self.margin(better, other) - self.least)


@dataclass
class ORPOLoss(PairLoss):
    """The better answer's mean nats are minimised too, and an answer is worth log(p / (1 - p)), p the geometric mean over its tokens.
    Hong et al. 2024, arXiv:2403.07691, equations 4 to 7."""

    weight: float
    beta = 1.0

    def worth(self, after: Tensor, before: Tensor | None, lengths: Tensor) -> Tensor:
        mean = (after / lengths).clamp_max(-1e-7)  # an answer of p = 1 would have infinite odds
        return mean - torch.log(-torch.expm1(mean))

    def compare(self, better: Tensor, other: Tensor) -> Tensor:
        return -self.weight * F.logsigmoid(self.margin(better, other))

    def beside(self, after: Tensor, lengths: Tensor) -> Tensor:
        return _mean_nats(after, lengths)


def _mean_nats(after: Tensor, lengths: Tensor) -> Tensor:
    """(pairs,) nats per token of the better answers."""
    return -(after / lengths)[0::2]
