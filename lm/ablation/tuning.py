"""Runs of several configs over seeds, each preceded by runs that tune a setting, for all configs in the same way."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lm.ablation.config import RunsConfig
from lm.ablation.matching import moved
from lm.ablation.runs import Asked, Job, Runs
from lm.errors import ConfigError
from lm.schema import flatten
from lm.training.config import TrainConfig

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_EXTENSIONS = 2  # further factors of 2 that are tried where the best value is at an edge


@dataclass(frozen=True)
class Tuned:
    """The best value of a variant, and what was tried: value -> mean metric, infinite where a run diverged."""

    best: float
    tried: dict[float, float]
    at_edge: bool


class TunedRuns(Runs):
    """Runs of variants, with tuning.  variants: config of each variant by name."""

    def __init__(self, folder: Path, asked: Asked, config: RunsConfig, variants: Mapping[str, TrainConfig]) -> None:
        super().__init__(folder, asked, config.threads)
        self.config, self.variants = config, variants

    @property
    def hash(self) -> str:
        """Returns the hash of what was asked, without the number of seeds, which may grow."""
        return self.asked.hash

    def missing(self) -> list[Job]:
        """Returns the missing tuning jobs; once there are none, the missing jobs that report."""
        tuning = [job for name in self.variants for job in self.tuning(name) if self.result(job) is None]
        if tuning:
            return tuning
        return [job for name in self.variants for job in self.reporting(name) if self.result(job) is None]

    def tuned(self, variant: str) -> Tuned | None:
        """Returns a variant's tuned value; None where nothing is tuned, or while a tuning run of the variant has no result."""
        means = self._means(self.tuning(variant))
        return _best(means) if means else None

    def reporting(self, variant: str) -> list[Job]:
        """Returns a variant's runs that are compared; [] while the variant is being tuned."""
        found = self.tuned(variant)
        if self.config.tune is not None and found is None:
            return []
        cfg = self.variants[variant] if found is None else moved(self.variants[variant], str(self.config.tune), found.best)
        return [self._job(f"{variant}-seed-{seed}", variant, seed, cfg) for seed in range(self.config.seeds)]

    @property
    def tuning_metric(self) -> str:
        """Returns what the tuning runs are compared by."""
        measures = [cfg.objective.measure(None) for cfg in self.variants.values()]
        learned = {measure.learned for measure in measures}
        return self.config.tuning_metric(all(measure.of_text for measure in measures), learned.pop() if len(learned) == 1 else "loss")

    def unit(self, metric: str) -> str:
        """Returns the unit of a metric of the runs; where variants differ in it, each."""
        return " or ".join(dict.fromkeys(cfg.objective.measure(None).unit(metric) for cfg in self.variants.values()))

    def results(self, jobs: Sequence[Job]) -> dict[int, float]:
        """Returns the metric by seed, of the jobs that have ended."""
        return {job.seed: value for job in jobs if (value := self.result(job)) is not None}

    def tuning(self, variant: str) -> list[Job]:
        """Returns the tuning runs: of five values around the variant's own, and of up to two more, as far as the config allows them, where
        the best so far is at an edge."""
        if self.config.tune is None:
            return []
        values = [self._own(variant) * factor for factor in FACTORS]
        for extended in range(_EXTENSIONS + 1):
            jobs = [self._tuning_job(variant, value, seed) for value in values for seed in self.config.tune_seeds]
            means = self._means(jobs)
            if extended == _EXTENSIONS or means is None:
                break
            edge = min(means, key=lambda value: means[value])
            if edge not in (min(values), max(values)):
                break
            further = edge * (2 if edge == max(values) else 0.5)
            if not self._allows(variant, further):
                break
            values.append(further)
        return jobs

    def _means(self, jobs: Sequence[Job]) -> dict[float, float] | None:
        """Returns the mean metric by tuned value, ascending; None while a run has no result."""
        found: dict[float, list[float]] = {}
        for job in jobs:
            result = self.result(job)
            if result is None:
                return None
            found.setdefault(job.tuned or 0.0, []).append(result)
        return {value: sum(found[value]) / len(found[value]) for value in sorted(found)}

    def _own(self, variant: str) -> float:
        value = flatten(self.variants[variant].tree()).get(str(self.config.tune))
        if not isinstance(value, float) or value <= 0:
            rule = "has no such positive number, or one that must be whole"
            raise ConfigError(f"tune={self.config.tune}: variant {variant} {rule}. Name one that every variant has, such as optim.lr.")
        return float(value)

    def _allows(self, variant: str, value: float) -> bool:
        """Whether the variant's config may have this value of the tuned setting, such as a dropout below 1."""
        try:
            moved(self.variants[variant], str(self.config.tune), value)
        except ConfigError:
            return False
        return True

    def _tuning_job(self, variant: str, value: float, seed: int) -> Job:
        try:
            cfg = moved(self.variants[variant], str(self.config.tune), value)
        except ConfigError as error:
            rule = f"tuning tries {min(FACTORS):g} to {max(FACTORS):g} times the value of {variant}, {self._own(variant):g}"
            raise ConfigError(f"tune={self.config.tune}: {rule}, and {error.sentence} Start from another value.") from None
        return self._job(f"tune-{variant}-{value:.4g}-seed-{seed}", variant, seed, cfg, value)

    def _job(self, name: str, variant: str, seed: int, cfg: TrainConfig, tuned: float | None = None) -> Job:
        metric = self.config.metric if tuned is None else self.tuning_metric
        return Job(name, variant, seed, cfg.replace(seed=seed, run={"name": name, "dir": str(self.folder)}), metric, tuned)


def _best(means: Mapping[float, float]) -> Tuned:
    """Returns the vertex of the parabola, in log value, through the best point and its neighbours; at an edge the point itself. It is at
    most a quarter of a step away: where one neighbour is far worse than the other, the curve is no parabola."""
    values = sorted(means)
    i = min(range(len(values)), key=lambda i: means[values[i]])
    around = [means[value] for value in values[max(0, i - 1) : i + 2]]
    if len(around) < 3 or not all(map(math.isfinite, around)):
        return Tuned(values[i], dict(means), i in (0, len(values) - 1))
    left, here, right = around
    curve = left - 2 * here + right
    shift = 0.5 * (left - right) / curve if curve > 0 else 0.0  # in steps of a factor of 2
    shift = max(-0.25, min(shift, 0.25))
    return Tuned(float(f"{values[i] * 2**shift:.3g}"), dict(means), False)
