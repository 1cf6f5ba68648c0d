"""The loss of answers that are rated as good or bad, each on its own, from how much more likely the model has made them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lm.losses.cross_entropy import LossSums, mean_of


@dataclass
class KTOLoss:
    """weight * sigmoid(-beta (gain - point)) of a good answer, weight * sigmoid(beta (gain - point)) of a bad one, summed over answers.
    Ethayarajh et al. 2024, arXiv:2402.01306, equation 8, where it is the weight minus the value."""

    beta: float
    good_weight: float = 1.0
    bad_weight: float = 1.0

    def __call__(self, gain: Tensor, good: Tensor, point: Tensor) -> LossSums:
        """gain: (answers,) log(p / p_start); good: (answers,) bool; point: () the reference point, the gain of answers to other prompts.
        Reports the gains of good and of bad answers, and how many are on the right side of 0, ties as half."""
        right = good.to(gain.dtype)
        sign, weight = 2 * right - 1, right * self.good_weight + (1 - right) * self.bad_weight
        total, seen, n = (weight * torch.sigmoid(self.beta * sign * (point - gain))).sum(), gain.detach(), len(gain)
        metrics = {"accuracy": mean_of((1 + (seen * sign).sign()).sum() / 2, n)}
        for name, of in (("good_gain", good), ("bad_gain", ~good)):
            metrics[name] = torch.stack([(seen * of).sum().float(), of.sum().float()])
        return LossSums(total, total.detach(), metrics=metrics)
