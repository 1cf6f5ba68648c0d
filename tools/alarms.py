"""How often equal variants are called different: python -m tools.alarms RUNS..., folders of one config with seeds of their own.

Random disjoint groups of five runs make studies of two and of five equal variants; those with any p below 5 % are counted.
Groups share runs, so the interval is by the jackknife over eighths of them (Efron & Stein 1981).
"""

import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from lm.report.statistics import ALPHA, differences
from lm.storage.run_folder import RunFolder

SEEDS, STUDIES, PARTS = 5, 1000, 8
METRIC = "test_bits_per_byte"


def rate(values: Sequence[float], variants: int, studies: int = STUDIES) -> float:
    """Returns the part of studies of equal variants, a baseline among them, in which p of any difference is below 5 %."""
    draw, alarms = random.Random(0), 0
    for _ in range(studies):
        chosen = draw.sample(list(values), variants * SEEDS)
        runs = [dict(enumerate(chosen[i : i + SEEDS])) for i in range(0, len(chosen), SEEDS)]
        found = differences(runs[0], {str(i): each for i, each in enumerate(runs[1:])})
        alarms += any(one.p is not None and one.p < ALPHA for one in found.values())
    return alarms / studies


def judged(values: Sequence[float], variants: int) -> dict[str, float]:
    """Returns the rate with its 95 % interval."""
    found = rate(values, variants)
    without = [rate([value for i, value in enumerate(values) if i % PARTS != part], variants, STUDIES // 4) for part in range(PARTS)]
    spread = (PARTS - 1) / PARTS * sum((each - statistics.fmean(without)) ** 2 for each in without)
    half = 1.96 * spread**0.5
    return {"variants": variants, "rate": found, "low": max(0.0, found - half), "high": found + half}


def main() -> None:
    """Prints a line of JSON for each size of study."""
    values = [float(RunFolder(Path(folder)).summary()[METRIC]) for folder in sys.argv[1:]]
    spread = {"runs": len(values), "mean": statistics.fmean(values), "sd": statistics.stdev(values)}
    print(json.dumps(spread))
    for variants in (2, 5):
        print(json.dumps(judged(values, variants)))


if __name__ == "__main__":
    main()
