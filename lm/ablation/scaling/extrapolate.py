"""Extrapolation of a scaling law beyond its runs; refused too far from them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from lm.ablation.scaling.config import Count
from lm.ablation.scaling.fit import Fit
from lm.ablation.scaling.law import Point
from lm.ablation.scaling.scaling_schema import FoundPoint, FoundValue
from lm.errors import ConfigError
from lm.units import si

MOST = 10  # times the largest measured value
_NUMBER = r"\d+(?:\.\d*)?(?:[eE]\+?\d{1,3})?"


@dataclass(frozen=True)
class Asking:
    """The questions to a law.  count: which parameters N counts.  flops: budgets C = 6 N D to find the best N and D of.  at: pairs N:D to
    predict the loss of. Raises ConfigError where a value is not a positive number."""

    count: Count = "non_embedding"
    flops: Sequence[float] = ()
    at: Sequence[str] = ()
    pairs: list[tuple[float, float]] = field(init=False)

    def __post_init__(self) -> None:
        found = [re.fullmatch(rf"({_NUMBER}):({_NUMBER})", text) for text in self.at]
        pairs = [(float(pair[1]), float(pair[2])) if pair else (0.0, 0.0) for pair in found]
        for key, text, values in [*(("flops", f"{c:g}", (c,)) for c in self.flops), *zip(["at"] * len(pairs), self.at, pairs, strict=True)]:
            if not all(0 < value < 1e300 for value in values):
                said = "N:D, parameters and tokens such as 2e6:4e7" if key == "at" else "FLOPs such as 1e14"
                raise ConfigError(f"{key}={text[:40]}: this is nothing to ask a law. Give {said}.")
        object.__setattr__(self, "pairs", pairs)

    def refuse_far(self, points: Sequence[Point]) -> None:
        """Raises ConfigError for questions over 10 times beyond these points, as far as that can be told without a law."""
        for flops in self.flops:
            _refuse(f"flops={flops:.3g}", points, flops=flops)
        for text, pair in zip(self.at, self.pairs, strict=True):
            _refuse(f"at={text}", points, *pair, flops=Point(*pair, 0).flops)


def predicted(fit: Fit, n: float, d: float) -> FoundPoint:
    """Returns the law's prediction at an N and D."""
    return FoundPoint(flops=Point(n, d, 0).flops, n=_exactly(n), tokens=_exactly(d), loss=fit.estimate(lambda law: law.loss(n, d)))


def optimum(fit: Fit, points: Sequence[Point], flops: float) -> FoundPoint:
    """Returns the N and D with the least loss at these FLOPs. Raises ConfigError over 10 times beyond the points, and where the law has no
    optimum."""
    where = f"flops={flops:.3g}"
    _refuse(where, points, flops=flops)
    if not all(falls(fit, points)):
        raise ConfigError(f"{where}: the losses do not fall with both sizes and tokens, so no pair is best. Spread them wider.")
    n, d, _ = fit.law.optimum(flops)
    _refuse(f"{where}, of which {si(n)} parameters and {si(d)} tokens would be best", points, n, d)
    return FoundPoint(
        flops=flops,
        n=fit.estimate(lambda law: law.optimum(flops).n),
        tokens=fit.estimate(lambda law: law.optimum(flops).d),
        loss=fit.estimate(lambda law: law.optimum(flops).loss),
    )


def falls(fit: Fit, points: Sequence[Point]) -> tuple[bool, bool]:
    """Returns whether the law's loss falls noticeably with the size, and whether with the tokens."""
    law, (n, d, loss) = fit.law, points[0]
    return law.A * n**-law.a > 1e-6 * loss, law.B * d**-law.b > 1e-6 * loss


def _refuse(where: str, points: Sequence[Point], n: float | None = None, d: float | None = None, flops: float | None = None) -> None:
    measured = zip(*[(point.n, point.d, point.flops) for point in points], strict=True)
    for what, asked, values in zip(("parameters", "tokens", "FLOPs"), (n, d, flops), measured, strict=True):
        low, high = min(values) / MOST, max(values) * MOST
        if asked is not None and not low * (1 - 1e-9) <= asked <= high * (1 + 1e-9):
            rule = f"runs of {si(min(values))} to {si(max(values))} {what} say nothing of {si(asked)}, over {MOST} times away"
            raise ConfigError(f"{where}: {rule}. Ask within {si(low)} to {si(high)}, or run larger sizes.")


def _exactly(number: float) -> FoundValue:
    return FoundValue(value=number, low=number, high=number)
