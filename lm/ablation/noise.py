"""How noisy a setting is: the spread of runs of one config, split into initial weights and order, and the seeds that an effect takes."""

import json
import math
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from lm.ablation.runs import Asked, Job, Runs
from lm.errors import ConfigError
from lm.report.statistics import Noise, seeds_needed, split_noise
from lm.schema import Tree
from lm.storage.atomic import replace_file
from lm.training.config import TrainConfig

SIDE = 3  # seeds of initial weights, and as many of data and dropout: every pair of them


class AskedNoise(Asked):
    """What is in noise-asked.json."""

    file: ClassVar[str] = "noise-asked.json"

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
        """Returns the runs, by row."""
        return [[self._job(init, order) for order in range(SIDE)] for init in range(SIDE)]

    def missing(self) -> list[Job]:
        return [job for row in self.jobs() for job in row if self.result(job) is None]

    def verdict(self) -> Tree:
        """Writes noise.json and returns what it says. Raises ConfigError where a run diverged, which has no spread, or is missing."""
        values = [[self.result(job) for job in row] for row in self.jobs()]
        known = [[value for value in row if value is not None and math.isfinite(value)] for row in values]
        if any(len(row) < SIDE for row in known):
            raise ConfigError(f"{self.folder}: {sum(map(len, known))} of {SIDE**2} runs have a finite {self.metric}. Run the others.")
        found = {"metric": self.metric, "runs": known, **vars(split_noise(known))}
        replace_file(self.folder / "noise.json", json.dumps(found, indent=1))
        return found

    def _job(self, init: int, order: int) -> Job:
        name = f"init-{init}-order-{order}"
        seeds = {"init": init, "data": order, "dropout": order}
        return Job(name, "baseline", init, self._config.replace(seed=seeds, run={"name": name, "dir": str(self.folder)}), self.metric)


def told(found: Tree, effects: list[float]) -> list[str]:
    """Returns what a person is told: the parts of the spread, and the seeds that each effect takes with 80 % power.

    Without pairing a difference spreads by sqrt(2) of a run; variants that share order, and where shapes agree initial weights, by less.
    """
    noise = Noise(**{key: found[key] for key in ("total", "init", "order", "rest")})
    lines = [
        f"{found['metric']}: one run spreads by {noise.total:.4f} (standard deviation; {SIDE} x {SIDE} runs, so within a factor of 2)",
        f"  of it initial weights {noise.init:.4f}, order and dropout {noise.order:.4f}, both together {noise.rest:.4f}",
    ]
    for effect in effects:
        apart, paired = (seeds_needed(math.sqrt(2) * sd, effect) for sd in (noise.total, noise.rest))
        lines.append(
            f"  an effect of {effect:g} takes {_seeds(apart)} a variant where pairing does not help, {_seeds(paired)} where it does fully"
        )
    return lines


def _seeds(n: int | None) -> str:
    return f"{n} seeds" if n is not None else "over 999 seeds"
