"""The spread of runs of one config, and the parts that initial weights and data order contribute."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lm.report.statistics import ALPHA, Interval


@dataclass(frozen=True)
class Noise:
    """The spread of runs of one config, as standard deviations of the metric.

    total: of a run if all seeds vary; interval: the 95 % interval of `total`.  init, order: the parts of the initial weights, and of the
    data order with dropout.  rest: the part that neither explains.
    """

    total: float
    interval: Interval
    init: float
    order: float
    rest: float


def split_noise(runs: Sequence[Sequence[float]]) -> Noise:
    """Splits the spread of a square of runs: a row for each `seed.init`, a column for each `seed.data`.

    Variance components by the mean squares of a two-way layout without repetition (Searle 1971, ch. 9). A negative component is set to 0,
    but the total is the unbiased sum of all; its interval is chi-square's with the degrees of freedom of Satterthwaite 1946.
    """
    n, m = len(runs), len(runs[0])
    grand = statistics.fmean(value for row in runs for value in row)
    rows = [statistics.fmean(row) - grand for row in runs]
    columns = [statistics.fmean(row[j] for row in runs) - grand for j in range(m)]
    rest = sum((runs[i][j] - grand - rows[i] - columns[j]) ** 2 for i in range(n) for j in range(m)) / ((n - 1) * (m - 1))
    init, order = sum(row**2 for row in rows) / (n - 1), sum(column**2 for column in columns) / (m - 1)
    both = rest * (1 - 1 / n - 1 / m)
    total = init + order + both
    squares = init**2 / (n - 1) + order**2 / (m - 1) + both**2 / ((n - 1) * (m - 1))
    roots = [math.sqrt(max(0.0, part)) for part in (total, init - rest / m, order - rest / n, rest)]
    return Noise(roots[0], _spread_interval(roots[0], total**2 / squares if squares else math.inf), *roots[1:])


def _spread_interval(sd: float, freedom: float) -> Interval:
    from scipy import stats

    if sd == 0:
        return 0.0, 0.0
    low, high = (sd * math.sqrt(freedom / float(stats.chi2.ppf(at, freedom))) for at in (1 - ALPHA / 2, ALPHA / 2))
    return low, high
