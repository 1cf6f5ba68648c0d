"""The page of a study, from trees as verdict.json has them: where each seed lies, what is escaped, and that extremes are drawn."""

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import asdict

from lm.report.statistics import differences
from lm.schema import Tree

Runs = dict[str, dict[int, float]]
Curves = dict[str, dict[str, dict[int, list[tuple[float, float]]]]]


def tree(runs: Runs, least_effect: float = 0.01, tried: Tree | None = None, seeds: int | None = None) -> Tree:
    """As of a study of these results, inf where a run diverged; the first is the baseline."""
    baseline, *others = runs
    found = differences(runs[baseline], {name: runs[name] for name in others}, least_effect)
    told = {name: json.loads(re.sub(r"-?Infinity", "null", json.dumps(asdict(one)))) for name, one in found.items()}
    tuned = {"key": "optim.lr", "value": 0.00225, "at_edge": False, "tried": tried} if tried else None
    rows = {
        name: {
            "runs": {str(seed): value if math.isfinite(value) else None for seed, value in sorted(values.items())},
            "diverged": sum(map(math.isinf, values.values())),
            "mean": None,
            "tuned": tuned,
            "tuning": None,
            "size": {"parameters": 45_184, "non_embedding": 34_944, "tokens": 30_720, "flops": 9_060_000_000},
            "knob": None,
            "difference": told.get(name),
        }
        for name, values in runs.items()
    }
    most = max((len(values) for values in runs.values()), default=0)
    asked = {"metric": "val_bits_per_byte", "baseline": baseline, "match": "tokens", "knob": None, "least_effect": least_effect}
    return {"study": "s", "hash": "0" * 16, **asked, "seeds": seeds or most, "level": 0.05, "variants": rows, "warnings": ["Say a=b."]}


def noisy(names: Sequence[str], seeds: int, spread: float = 0.01) -> Runs:
    draw = random.Random(0)
    return {name: {seed: 4 + 0.01 * i + draw.gauss(0, spread) for seed in range(seeds)} for i, name in enumerate(names)}


def falling(runs: Runs) -> Curves:
    """A line for each run that ends at its result."""
    draw = random.Random(1)
    ends = {name: {seed: 4.0 if math.isinf(value) else value for seed, value in values.items()} for name, values in runs.items()}
    line = {
        name: {seed: [(float(at), end + 30 / at + draw.gauss(0, 0.002)) for at in range(10, 101, 10)] for seed, end in values.items()}
        for name, values in ends.items()
    }
    return {"val_bits_per_byte": line, "loss": line}
