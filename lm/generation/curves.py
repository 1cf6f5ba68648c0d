"""Calibration of a model, and its loss by the place in a document: sums over labels, so that parts add up."""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.nn.batch import IGNORED, Batch
from lm.schema import Tree

BINS = 15
_PLACES = 32  # powers of two: more than any row has


@dataclass
class Curves:
    """Sums over labels."""

    calibration: NDArray[np.float64] = field(default_factory=lambda: np.zeros((BINS, 3)))
    """By the probability of the likeliest token, in bins of equal width ((i - 1) / 15, i / 15]: the number of labels, the sum of these
    probabilities, and how often the likeliest token was the label."""
    places: NDArray[np.float64] = field(default_factory=lambda: np.zeros((_PLACES, 2)))
    """By the label's place in its document, 0, 1, 2-3, 4-7 ...: the number of labels, and the sum of their nats."""

    def add(self, batch: Batch, labels: Tensor, guesses: Tensor) -> None:
        """Adds a batch.  labels: (b, s); guesses: (n, 3), as `guesses` of lm.losses.measure reads them of the n labels."""
        nats, sure, right = guesses.cpu().double().numpy().T
        certain = ~np.isnan(sure)  # a number is told with no probability
        place = torch.arange(labels.shape[1]).expand(labels.shape) if batch.positions is None else batch.positions
        ones = np.ones_like(nats)
        bins = np.clip(np.ceil(sure[certain] * BINS), 1, BINS).astype(np.int64) - 1
        np.add.at(self.calibration, bins, np.stack([ones, sure, right], -1)[certain])
        powers = np.frexp(place.to(labels.device)[labels != IGNORED].cpu().numpy())[1]  # 0 -> 0, 1 -> 1, 2 and 3 -> 2
        np.add.at(self.places, powers, np.stack([ones, nats], -1))

    def __add__(self, other: Self) -> Self:
        return type(self)(self.calibration + other.calibration, self.places + other.places)

    def flat(self) -> list[float]:
        """Returns the sums as numbers that processes can add up."""
        return [*self.calibration.ravel().tolist(), *self.places.ravel().tolist()]

    @classmethod
    def of_flat(cls, sums: list[float]) -> Self:
        """Returns the curves of the sums that `flat` returned."""
        n = BINS * 3
        return cls(np.array(sums[:n]).reshape(BINS, 3), np.array(sums[n:]).reshape(_PLACES, 2))

    def ece(self) -> float | None:
        """Expected calibration error, sum over bins of n / N * |right / n - sure / n|.  Guo et al. 2017, arXiv:1706.04599, equation 3. None
        where no probabilities were told."""
        n, sure, right = self.calibration.T
        return float(np.abs(right - sure).sum() / n.sum()) if n.any() else None

    def reliability(self) -> list[Tree]:
        """Returns of each bin that is not empty the mean probability, how often the token was right, and how many there are."""
        return [{"probability": sure / n, "accuracy": right / n, "tokens": int(n)} for n, sure, right in self.calibration.tolist() if n]

    def by_place(self) -> list[Tree]:
        """Returns the loss at the places 0, 1, 2-3, 4-7 ... that have labels."""
        spans = [(0, 0), *((1 << power, (1 << power + 1) - 1) for power in range(_PLACES - 1))]
        found = zip(spans, self.places.tolist(), strict=True)
        return [{"from": low, "to": high, "loss": nats / n, "tokens": int(n)} for (low, high), (n, nats) in found if n]
