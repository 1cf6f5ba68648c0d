"""How often equal variants are called different, and how often the intervals hold the truth: python -m tools.alarms [RUNS...]

Without arguments of simulated runs, over the rows and seeds below: part of the studies with any p below 5 %, and of those in which an
interval, and all of them, hold the truth; once where all variants are equal and once where they lie far apart. Then with early looks; and
where all variants differ by the least effect, so that "equal within", and of better ones "no better" as well, are false.

With folders of one config and seeds of their own, by random disjoint groups of five of them, which make studies of two and of five equal
variants. One study makes 40 such runs, and those of tools/power.py beside them; killed, the same command goes on:

    lm ablate recipes=ablation/base model.ffn.hidden=256,230 seeds=40 jobs=2 name=hidden
    python -m tools.alarms runs/studies/hidden/256-seed-*
"""

import json
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scipy import stats

from lm.report.statistics import ALPHA, differences, holm, interval_of, p_value
from lm.storage.run_folder import RunFolder
from tools.options import folders, refuse

METRIC = "test_bits_per_byte"
SEEDS, STUDIES, PARTS = 5, 20_000, 8  # of a group, of groups that are drawn, and of the runs for the jackknife
SIMULATED, ROWS = 10_000, (3, 5, 10)  # studies, and rows with the baseline; as many seeds


def exact(part: float, trials: int) -> tuple[float, float]:
    """Returns the 95 % interval of a rate that was seen in these independent trials.  Clopper & Pearson 1934."""
    k = part * trials
    low = float(stats.beta.ppf(ALPHA / 2, k, trials - k + 1)) if k > 0 else 0.0
    return low, float(stats.beta.ppf(1 - ALPHA / 2, k + 1, trials - k)) if k < trials else 1.0


def alarm(pairs: Mapping[str, Sequence[float]]) -> bool:
    """Returns whether any variant of a study is called different, by its differences to the baseline."""
    return min(holm({name: p_value(each) for name, each in pairs.items()})[0].values()) < ALPHA


def drawn(values: Sequence[float], variants: int, studies: int) -> Iterator[dict[str, list[float]]]:
    """Yields the differences to the first of random disjoint groups of runs."""
    draw, pool = random.Random(0), list(values)
    for _ in range(studies):
        chosen = draw.sample(pool, variants * SEEDS)
        groups = [chosen[i : i + SEEDS] for i in range(0, len(chosen), SEEDS)]
        yield {str(k): [mine - base for mine, base in zip(group, groups[0], strict=True)] for k, group in enumerate(groups) if k}


def judged(values: Sequence[float], variants: int, studies: int) -> dict[str, float]:
    """Returns the part of studies of equal variants, a baseline among them, that raise an alarm, with its 95 % interval.

    Groups share runs, so the interval is by the jackknife over eighths of the runs, which is too wide rather than too narrow (Efron & Stein
    1981); what the drawing itself adds to the spread of the eighths is taken off.
    """
    rates = [
        sum(map(alarm, drawn([value for i, value in enumerate(values) if i % PARTS != left_out], variants, studies))) / studies
        for left_out in range(PARTS + 1)  # the last leaves out nothing
    ]
    *without, found = rates
    by_drawing = found * (1 - found) / studies
    spread = (PARTS - 1) / PARTS * sum((each - statistics.fmean(without)) ** 2 for each in without)
    half = 1.96 * (max(0.0, spread - (PARTS - 1) ** 2 / PARTS * by_drawing) + by_drawing) ** 0.5
    return {"variants": variants, "alarms": found, "low": max(0.0, found - half), "high": found + half}


def simulated(rows: int, seeds: int, apart: float, studies: int = SIMULATED) -> dict[str, float]:
    """Returns what studies of normal runs say.  apart: how far each variant lies beyond the one before, in those of a run."""
    draw, alarms, each, together = random.Random(rows), 0, 0, 0
    for _ in range(studies):
        base = [draw.gauss(0, 1) for _ in range(seeds)]
        pairs = {str(k): [apart * k + draw.gauss(0, 1) - one for one in base] for k in range(1, rows)}
        corrected, levels = holm({name: p_value(own) for name, own in pairs.items()})
        alarms += min(corrected.values()) < ALPHA
        ends = {name: interval_of(own, levels[name]) for name, own in pairs.items()}
        held = sum(low <= apart * int(name) <= high for name, (low, high) in ends.items())
        each, together = each + held, together + (held == rows - 1)
    low, high = exact(alarms / studies, studies)
    said = {"rows": rows, "seeds": seeds, "apart": apart, "alarms": alarms / studies, "low": low, "high": high}
    return said | {"each holds": each / studies / (rows - 1), "all hold": together / studies}


def looked(rows: int, studies: int = SIMULATED) -> dict[str, float]:
    """Returns what studies of five seeds with a look after three say of equal variants: by any p, by any "better", and of the intervals."""
    draw, alarms, better, given_up, together = random.Random(rows), 0, 0, 0, 0
    for _ in range(studies):
        runs = {str(k): {seed: draw.gauss(0, 1) for seed in range(SEEDS)} for k in range(rows)}
        found = differences(runs.pop("0"), runs, look=range(3)).values()
        alarms += any(one.p is not None and one.p < ALPHA for one in found)
        better += any(one.verdict == "better" for one in found)
        given_up += sum(one.given_up for one in found)
        together += all(one.interval is not None and one.interval[0] <= 0 <= one.interval[1] for one in found)
    low, high = exact(better / studies, studies)
    said = {"rows": rows, "seeds": SEEDS, "look": 3, "alarms": alarms / studies, "better": better / studies, "low": low, "high": high}
    return said | {"given up": given_up / studies / (rows - 1), "all hold": together / studies}


def dismissed(variants: int, sign: int, studies: int = SIMULATED) -> dict[str, float]:
    """Returns the part of studies that call any variant equal within the least effect, or "no better", where each is worse or better by it.

    sign: 1 where they are worse, -1 where better. Ten seeds; differences spread by half of the least effect.
    """
    draw, equal, no_better = random.Random(variants), 0, 0
    for _ in range(studies):
        runs = {str(k): {seed: sign + draw.gauss(0, 0.5) for seed in range(10)} for k in range(variants)}
        found = {one.verdict for one in differences(dict.fromkeys(range(10), 0.0), runs, least_effect=1.0).values()}
        equal, no_better = equal + ("equal within" in found), no_better + bool({"equal within", "no better"} & found)
    told = equal if sign > 0 else no_better
    low, high = exact(told / studies, studies)
    return {"variants": variants, "off by least effects": sign, "false": told / studies, "low": low, "high": high}


def main(runs: Sequence[str | Path]) -> None:
    """Prints a line of JSON for each size of study."""
    if not runs:
        for apart in (0.0, 20.0):
            for rows in ROWS:
                for seeds in ROWS:
                    print(json.dumps(simulated(rows, seeds, apart)), flush=True)
        for rows in ROWS:
            print(json.dumps(looked(rows)), flush=True)
        for sign in (1, -1):
            for variants in (1, 2, 4):
                print(json.dumps(dismissed(variants, sign)), flush=True)
        return
    values = [_value(Path(run)) for run in runs]
    most = (len(values) - -(-len(values) // PARTS)) // SEEDS
    if most < 2:
        sys.exit(f"alarms: {len(values)} runs are too few for two groups of {SEEDS} without an eighth of them. Give 12, or 40.")
    print(json.dumps({"runs": len(values), "mean": statistics.fmean(values), "sd": statistics.stdev(values)}))
    for variants in (each for each in (2, 5) if each <= most):
        print(json.dumps(judged(values, variants, STUDIES)), flush=True)


def _value(run: Path) -> float:
    found = RunFolder(run).summary() if run.is_dir() else None
    if not found or METRIC not in found:
        refuse(f"{run}: no finished run with {METRIC} is there. Give runs of lm ablate with data.test_frac.")
    return float(found[METRIC])


if __name__ == "__main__":
    main(folders(sys.argv[1:], __doc__, least=0))
