"""How runs of one config spread, and what of it initial weights and order contribute."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lm.report.statistics import ALPHA, Interval


@dataclass(frozen=True)
class Noise:
    """How runs of one config spread: standard deviations of the metric.

    total: of one run whose seeds all move; interval: its own at 95 %.  init, order: what the initial weights, and the order of the data
    with dropout, contribute.  rest: what neither explains.
    """

    total: float
    interval: Interval
    init: float
    order: float
    rest: float


def split_noise(runs: Sequence[Sequence[float]]) -> Noise:
    """Splits the spread of a square of runs, a row for each `seed.init` and a column for each `seed.data`.

    Components of variance by the mean squares of a two-way layout without repetition (Searle 1971, ch. 9). A negative one is 0, while the
    total is the unbiased sum of all, whose interval is chi-square's with the degrees of freedom of Satterthwaite 1946.
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
