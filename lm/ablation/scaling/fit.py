"""Fits the scaling law by variable projection, and finds the fit's uncertainty by resampling."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, nnls

from lm.ablation.scaling.config import LEAST
from lm.ablation.scaling.law import Law, Point
from lm.ablation.scaling.scaling_schema import FoundValue
from lm.errors import ConfigError
from lm.units import counted

Array = NDArray[np.float64]
DELTA = 1e-3  # of Huber's loss on log loss: Hoffmann et al. 2022, section 3.3
EXPONENTS = (0.02, 2.5)
LEAST_CELLS = 8  # of the points: with fewer cells resamples agree with each other, but not with the truth
_LEAST_DRAWN = 6  # cells in a resample: five unknowns, and one more to show a misfit
RESAMPLES = 300
_GRID = np.geomspace(0.05, 1.6, 8)
_NOTHING = 1e-9  # lower bound of coefficients, relative to the loss
_DRAWS = 20  # most draws per resample: draws with too few sizes are repeated


@dataclass(frozen=True)
class Fit:
    """A fitted law.  law: fitted to all points.  resampled: fitted to each resample."""

    law: Law
    resampled: tuple[Law, ...]

    def estimate(self, of: Callable[[Law], float]) -> FoundValue:
        """Returns a value of the law with its interval."""
        low, high = np.percentile([*map(of, self.resampled)], [2.5, 97.5], method="inverted_cdf")  # actual values: some may be infinite
        return FoundValue(value=of(self.law), low=float(low), high=float(high))


def fit_law(points: Sequence[Point], resamples: int) -> Fit:
    """Fits the law to all points, and to resamples of their cells.

    A cell is the runs of one N and D. Its seeds stay together, since the law's misfit at an N and D is the same for all of its seeds. A
    resample draws as many cells as there are, with replacement; one with too few sizes or numbers of tokens is drawn anew.
    Raises ConfigError where the points cannot determine five unknowns.
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
    """Returns the law with the least Huber loss of log L, with coefficients of at least 0 and exponents within EXPONENTS.

    Variable projection (Golub & Pereyra 1973): for given exponents the coefficients are the solution of a non-negative linear least squares
    problem in relative residuals, which needs no initial guess. A grid of exponents, and a simplex search from the best of them, find the
    basin; from there all five parameters are minimized together. Values are centred and scaled, so that the tolerance means the same at
    every size (Besiroglu et al. 2024, arXiv:2404.10102, on a search that stops too early).
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
    """Returns the sum of Huber(log(E + A e^(-a x) + B e^(-b y)) - log L) / DELTA^2, and its gradient.  values: E, A, B, a, b."""
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
    """Returns the best coefficients for these exponents, and the root of the sum of squared relative residuals."""
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
