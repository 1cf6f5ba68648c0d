"""How noisy a setting is: the spread of runs of one config, split into parts of initial weights and of data order; how much pairing by seed
reduces the noise of a variant's difference; and how many seeds an effect needs."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import Field

from lm.ablation.runs import Asked, Job, Runs
from lm.ablation.variants import plain_config, refuse_equal, refuse_other_figures
from lm.errors import ConfigError
from lm.report.noise import split_noise
from lm.report.statistics import ALPHA, pairing, seeds_needed
from lm.schema import Tree
from lm.storage.atomic import replace_file
from lm.training.config import TrainConfig

SIDE = 3  # number of seeds of initial weights, and of data and dropout; every pair of them is run
Square = Sequence[Sequence[float]]


class AskedNoise(Asked):
    """What is in noise-asked.json."""

    file = "noise-asked.json"

    threads: int = Field(ge=1, le=1024)
    """Threads of each run: another number gives other bits."""
    config: TrainConfig
    """The config of all runs; seed, name and folder of a run are its own."""


class NoiseRuns(Runs):
    """A square of runs of one config: a row for each `seed.init`, a column for each `seed.data` and `seed.dropout`."""

    def __init__(self, folder: Path, asked: AskedNoise, metric: str) -> None:
        super().__init__(folder, asked, asked.threads)
        self._config, self.metric = asked.config, metric

    def jobs(self) -> list[list[Job]]:
        """Returns the runs, row by row."""
        return [[self._job(init, order) for order in range(SIDE)] for init in range(SIDE)]

    def missing(self) -> list[Job]:
        return [job for row in self.jobs() for job in row if self.result(job) is None]

    def square(self) -> Square:
        """Returns the metric of each run, row by row. Raises ConfigError where a run is missing or diverged."""
        values = [[self.result(job) for job in row] for row in self.jobs()]
        known = [[value for value in row if value is not None and math.isfinite(value)] for row in values]
        if any(value is None for row in values for value in row):
            raise ConfigError(f"{self.folder}: {sum(map(len, known))} of {SIDE**2} runs have a finite {self.metric}. Run the others.")
        if lost := SIDE**2 - sum(map(len, known)):
            said = f"{lost} of {SIDE**2} runs diverged, which has no spread"
            raise ConfigError(f"{self.folder}: {said}. Lower optim.lr, and give the new runs another name=.")
        return known

    def _job(self, init: int, order: int) -> Job:
        name = f"init-{init}-order-{order}"
        seeds = {"init": init, "data": order, "dropout": order}
        return Job(name, "baseline", init, self._config.replace(seed=seeds, run={"name": name, "dir": str(self.folder)}), self.metric)


def noise_runs(folder: Path, configs: Mapping[str, TrainConfig], threads: int, metric: str) -> dict[str, NoiseRuns]:
    """Returns the runs of each config by name: of the first, the baseline, in this folder, of each variant in a folder below it.

    threads: of each run.  Raises ConfigError where two configs are the same, or the runs would not have the metric, or each another one.
    """
    plain = {name: plain_config(f"variants.{name}", config, metric) for name, config in configs.items()}
    refuse_equal(plain)
    refuse_other_figures(plain, next(iter(plain)), metric)
    folders = {name: folder / "variants" / name if at else folder for at, name in enumerate(plain)}
    return {name: NoiseRuns(folders[name], AskedNoise(threads=threads, config=config), metric) for name, config in plain.items()}


def verdict(runs: Mapping[str, NoiseRuns]) -> Tree:
    """Writes noise.json into the folder of the first config, the baseline, and returns its content."""
    squares = {name: each.square() for name, each in runs.items()}
    (baseline, base), *variants = squares.items()
    own = runs[baseline]
    found = {
        "metric": own.metric,
        "runs": base,
        **asdict(split_noise(base)),
        "baseline": baseline,
        "variants": {name: _against(base, square) for name, square in variants},
    }
    replace_file(own.folder / "noise.json", json.dumps(found, indent=1))
    return found


def _against(baseline: Square, variant: Square) -> Tree:
    """Returns the noise of a variant's runs, and of their differences to the baseline run by run, which form a square as well."""
    difference = [[mine - theirs for mine, theirs in zip(*rows, strict=True)] for rows in zip(variant, baseline, strict=True)]
    noise = {name: split_noise(square) for name, square in (("baseline", baseline), ("own", variant), ("difference", difference))}
    rho = pairing(*(each.total for each in noise.values()))
    return {"runs": variant, **asdict(noise["own"]), "difference": asdict(noise["difference"]), "pairing": rho}


def told(found: Tree, effects: list[float]) -> list[str]:
    """Returns lines for the terminal: the parts of the spread, and the seeds that each effect needs for 80 % power.

    Unpaired, a difference spreads sqrt(2) times as much as a run; how much less it does when paired depends on the variant and is measured.
    """
    lines = [
        f"{found['metric']}: one run spreads by {_spread(found)} (standard deviation of {SIDE} x {SIDE} runs)",
        f"  of it initial weights {found['init']:.4f}, order and dropout {found['order']:.4f}, both together {found['rest']:.4f}",
    ]
    apart = {"total": math.sqrt(2) * found["total"], "interval": [math.sqrt(2) * end for end in found["interval"]]}
    if not found["variants"]:
        lines += [f"  an effect of {effect:g} takes {_seeds(apart, effect)} where pairing by seed does not help" for effect in effects]
        return [*lines, "  what pairing saves depends on the variant: name one, as in model/ffn=swiglu,gelu, and its runs are measured too"]
    for name, row in found["variants"].items():
        rho = f", a correlation of {row['pairing']:.2f}" if row["pairing"] is not None else ""
        alone = math.hypot(found["total"], row["total"])
        lines.append(f"{name} less {found['baseline']}: spreads by {_spread(row['difference'])}, and by {alone:.4f} without pairing{rho}")
        level = ALPHA / len(found["variants"])  # as Holm's procedure judges the first of them
        for effect in effects:
            without = _needed(seeds_needed(alone, effect, level))
            lines.append(f"  an effect of {effect:g} takes {_seeds(row['difference'], effect, level)}, and {without} without pairing")
    return lines


def _spread(noise: Tree) -> str:
    low, high = noise["interval"]
    return f"{noise['total']:.4f} [{low:.4f}, {high:.4f}]"


def _seeds(noise: Tree, effect: float, level: float = ALPHA) -> str:
    """Returns the number of seeds that an effect needs, with the numbers at the ends of the spread's interval."""
    low, high = (_needed(seeds_needed(end, effect, level)) for end in noise["interval"])
    return f"{_needed(seeds_needed(noise['total'], effect, level))} seeds a variant [{low}, {high}]"


def _needed(n: int | None) -> str:
    return str(n) if n is not None else "over 999"
