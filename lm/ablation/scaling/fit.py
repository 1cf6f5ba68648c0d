"""Fitting the law by variable projection, and how far the fit can be believed, by resampling."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, nnls

from lm.ablation.scaling.config import LEAST
from lm.ablation.scaling.law import Law, Point
from lm.errors import ConfigError
from lm.units import counted

Array = NDArray[np.float64]
DELTA = 1e-3  # of Huber's loss on log loss: Hoffmann et al. 2022, section 3.3
EXPONENTS = (0.02, 2.5)
LEAST_CELLS = 8  # of the points: of fewer, resamples agree with each other and not with the truth
_LEAST_DRAWN = 6  # of a resample: five unknowns, and one to see a misfit by
RESAMPLES = 300
_GRID = np.geomspace(0.05, 1.6, 8)
_NOTHING = 1e-9  # of a loss
_DRAWS = 20  # per resample, before too few sizes are left among them


class Estimate(NamedTuple):
    """low, high: 95 % of the resamples lie between them."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """law: of all points.  resampled: of each resample."""

    law: Law
    resampled: tuple[Law, ...]

    @property
    def laws(self) -> tuple[Law, ...]:
        """Returns all of them, that of all points first: what `estimate` takes of each."""
        return (self.law, *self.resampled)


def estimate(values: Sequence[float]) -> Estimate:
    """values: of all points first, then of each resample."""
    low, high = np.percentile(values[1:], [2.5, 97.5], method="inverted_cdf")  # which are values, where some are beyond all bounds
    return Estimate(values[0], float(low), float(high))


def fit_law(points: Sequence[Point], resamples: int) -> Fit:
    """Fits the law, and again to resamples of its cells.

    A cell is an N and D; its seeds stay together, since what a law misses at a size, all seeds of it miss alike. A resample has as
    many cells as there are, drawn with replacement; one that is left with too few sizes or numbers of tokens is drawn anew.
    Raises ConfigError where the points cannot tell five unknowns.
    """
    _refuse(points)
    cells: dict[tuple[float, float], list[Point]] = {}
    for point in points:
        cells.setdefault((point.n, point.d), []).append(point)
    drawn = np.random.default_rng(0)
    groups = list(cells.values())
    found: list[Law] = []
    for _ in range(resamples * _DRAWS):
        some = [groups[i] for i in drawn.integers(0, len(groups), len(groups))]
        if _told_apart({(cell[0].n, cell[0].d) for cell in some}) and len(found) < resamples:
            found.append(best_law([point for cell in some for point in cell], _GRID[1::3]))
    return Fit(best_law(points), tuple(found))


def best_law(points: Sequence[Point], grid: Array = _GRID) -> Law:
    """Returns the law of the least Huber loss of log L, all coefficients at least 0 and exponents within EXPONENTS.

    Variable projection (Golub & Pereyra 1973): for given exponents the coefficients are a non-negative linear least squares of
    relative residuals, which starts at no guess; a grid of exponents and a simplex search from its best lead to the basin, and all five
    go down from there. Besiroglu et al. 2024, arXiv:2404.10102, on a search that stops early: values are centred and scaled, so that
    the tolerance means the same at every size.
    """
    n, d, loss = np.array(points, dtype=float).T
    middle = [float(np.exp(np.mean(np.log(values)))) for values in (n, d, loss)]
    x, y, level = np.log(n / middle[0]), np.log(d / middle[1]), loss / middle[2]
    best = min((np.array([a, b]) for a in grid for b in grid), key=lambda pair: _misfit(pair, x, y, level))
    start: Any = minimize(_misfit, best, (x, y, level), method="Nelder-Mead", bounds=[EXPONENTS] * 2, options={"maxiter": 30})
    values = np.concatenate([_projected(start.x, x, y, level)[0], start.x])
    bounds = [(_NOTHING, None)] * 3 + [EXPONENTS] * 2  # a loss of 0 has no logarithm
    options = {"maxiter": 1000, "ftol": 1e-12, "gtol": 1e-7, "maxcor": 20}
    found: Any = minimize(huber, values, (x, y, np.log(level)), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    e, at_n, at_d, a, b = (float(value) for value in found.x)
    return Law(e * middle[2] if e > 2 * _NOTHING else 0.0, at_n * middle[2] * middle[0] ** a, at_d * middle[2] * middle[1] ** b, a, b)


def huber(values: Array, x: Array, y: Array, log_loss: Array) -> tuple[float, Array]:
    """sum of Huber(log(E + A e^(-a x) + B e^(-b y)) - log L) / DELTA^2, and its gradient.  values: E, A, B, a, b."""
    e, at_n, at_d, a, b = values
    columns = np.stack([np.ones_like(x), np.exp(-a * x), np.exp(-b * y)])
    law = np.array([e, at_n, at_d]) @ columns
    away = (np.log(law) - log_loss) / DELTA
    slope = np.clip(away, -1, 1)
    each = slope / law / DELTA
    bends = [-at_n * (each * columns[1]) @ x, -at_d * (each * columns[2]) @ y]
    return float(np.sum(slope * (away - slope / 2))), np.concatenate([columns @ each, bends])


def _misfit(exponents: Array, x: Array, y: Array, loss: Array) -> float:
    return _projected(exponents, x, y, loss)[1]


def _projected(exponents: Array, x: Array, y: Array, loss: Array) -> tuple[Array, float]:
    """The best coefficients of these exponents, and the root of the sum of squared relative residuals."""
    columns = np.stack([np.ones_like(x), np.exp(-exponents[0] * x), np.exp(-exponents[1] * y)], axis=1)
    coefficients, misfit = nnls(columns / loss[:, None], np.ones_like(loss))
    return np.maximum(coefficients, _NOTHING), float(misfit)


def _told_apart(cells: set[tuple[float, float]]) -> bool:
    sizes, tokens = (len(set(values)) for values in zip(*cells, strict=True))
    return min(sizes, tokens) >= LEAST and len(cells) >= _LEAST_DRAWN


def _refuse(points: Sequence[Point]) -> None:
    lost = [point.loss for point in points if not (math.isfinite(point.loss) and point.loss > 0)]
    if lost:
        raise ConfigError(f"metric: {lost[0]:g} has no logarithm, and the law is of losses above 0. Choose a loss.")
    cells = {(point.n, point.d) for point in points}
    for key, noun, values in (("sizes", "size", {n for n, _ in cells}), ("tokens", "token count", {d for _, d in cells})):
        if len(values) < LEAST:
            raise ConfigError(f"{key}: {counted(len(values), noun)} cannot show a bend, and the law has one. Give {LEAST} or more.")
    if len(cells) < LEAST_CELLS:
        raise ConfigError(f"sizes: {len(cells)} pairs of size and tokens are there, and five unknowns take {LEAST_CELLS}. Give more.")
    if len({point.loss for point in points}) == 1:
        raise ConfigError(f"sizes: all losses are {points[0].loss:.6g}, and what does not fall has no law. Spread sizes and tokens wider.")
