"""Whether an effect is found as often as was said: python -m tools.power STUDY [NOISE]

STUDY is the folder of a study of many seeds, NOISE that of `lm ablate noise` for the same variants. Random groups of n of the pairs are
tested as a study of n seeds; beside how often they tell the effect stands the power that NOISE promised for it, at its spread and at both
ends of that spread's interval, or without NOISE the power at the spread of the pairs themselves. The effect is the mean over all pairs.
Groups share pairs: the interval is Clopper and Pearson's for as many trials as there are groups that share none.

    lm ablate recipes=ablation/base model.ffn.hidden=256,230 seeds=40 jobs=2 name=hidden
    lm ablate noise recipes=ablation/base model.ffn.hidden=256,230 metric=test_bits_per_byte data.test_frac=0.5 jobs=2 name=noise-hidden
    python -m tools.power runs/studies/hidden runs/studies/noise-hidden
"""

import json
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lm.ablation.judging.verdict import verdict
from lm.ablation.study import read_study
from lm.errors import LmError
from lm.report.statistics import power
from lm.storage.reading import read_json
from tools import alarms
from tools.alarms import alarm, exact
from tools.options import folders, refuse

SEEDS = (2, 3, 4, 5, 6, 8, 10, 15, 20)


def checked(pairs: Sequence[float], spreads: Sequence[float], groups: int) -> Iterator[dict[str, float | list[float]]]:
    """Yields for each number of seeds how often groups of it tell the effect, and the power at each spread of the differences."""
    effect = abs(statistics.fmean(pairs))
    for n in (n for n in SEEDS if n <= len(pairs) // 2):
        draw = random.Random(n)
        found = sum(alarm({"variant": draw.sample(list(pairs), n)}) for _ in range(groups)) / groups
        low, high = exact(found, len(pairs) // n)
        yield {
            "seeds": n,
            "found": found,
            "low": low,
            "high": high,
            "promised": [power(n, sd, effect) if sd > 0 else 1.0 for sd in spreads],
        }


def main(folder: str | Path, noise: str | Path | None = None) -> None:
    """Prints for each variant a line of JSON that says what it is, and one for each number of seeds."""
    promised = read_json(Path(noise) / "noise.json")["variants"] if noise is not None else {}
    for name, row in verdict(read_study(Path(folder)))["variants"].items():
        if row["difference"] is None:
            continue
        pairs = row["difference"]["pairs"]
        if len(pairs) < 2 * SEEDS[0] or None in pairs:
            sys.exit(f"power: {name} has {len(pairs)} pairs, of which none may have diverged. Give a study of 40 seeds.")
        own = statistics.stdev(pairs)
        spread = promised[name]["difference"] if noise is not None else {"total": own, "interval": []}
        said = {"variant": name, "pairs": len(pairs), "effect": statistics.fmean(pairs), "give or take": own / math.sqrt(len(pairs))}
        print(json.dumps(said | {"spread": own, "promised by": [spread["total"], *spread["interval"]]}))
        for line in checked(pairs, [spread["total"], *spread["interval"]], alarms.STUDIES):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    try:
        main(*folders(sys.argv[1:], __doc__, most=2))
    except LmError as error:
        refuse(error.sentence)
