"""The scaling law L = E + A / N^a + B / D^b, and its optimum."""

import math
from dataclasses import dataclass
from typing import NamedTuple

FLOPS_PER = 6  # FLOPs per parameter and token, forward and backward: Kaplan et al. 2020, arXiv:2001.08361, section 2.1
_MOST = 200.0


class Point(NamedTuple):
    """N, D and loss of a run or a prediction.  n: parameters.  d: tokens."""

    n: float
    d: float
    loss: float

    @property
    def flops(self) -> float:
        """C = 6 N D."""
        return FLOPS_PER * self.n * self.d


@dataclass(frozen=True)
class Law:
    """Hoffmann et al. 2022, arXiv:2203.15556, eq. 2; their alpha and beta are a and b here."""

    E: float
    A: float
    B: float
    a: float
    b: float

    def loss(self, n: float, d: float) -> float:
        """E + A / n^a + B / d^b."""
        return self.E + self.A * n**-self.a + self.B * d**-self.b

    @property
    def n_exponent(self) -> float:
        """The exponent b / (a + b) with which the best N grows with C; that of the best D is 1 less this exponent."""
        return self.b / (self.a + self.b)

    def optimum(self, flops: float) -> Point:
        """Returns N, D and loss where the loss is least for C = 6 N D FLOPs: N = (a A / (b B) (C / 6)^b)^(1 / (a+b)), D = C / 6 N; eq. 4.

        A and B must be above 0; where one is nearly 0, N ends at e^+-200.
        """
        x = math.log(self.a * self.A) - math.log(self.b * self.B) + self.b * math.log(flops / FLOPS_PER)
        n = math.exp(max(-_MOST, min(_MOST, x / (self.a + self.b))))
        d = flops / (FLOPS_PER * n)
        return Point(n, d, self.loss(n, d))
