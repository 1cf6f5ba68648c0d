"""A study on disk: frozen before its first run, and the runs that it asks for."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lm.ablation.config import StudyConfig
from lm.ablation.matching import matched, moved
from lm.ablation.probe import measured
from lm.ablation.runs import NO_RUN, Asked, Job, Runs
from lm.errors import ConfigError
from lm.report.statistics import Difference, differences
from lm.schema import flatten
from lm.training.config import TrainConfig

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
TEST_FRAC = 0.5
_EXTENSIONS = 2  # further factors of 2 where the best is at an edge


@dataclass(frozen=True)
class Tuned:
    """The best value of a variant, and what was tried: value -> mean metric, infinite where a run diverged."""

    best: float
    tried: dict[float, float]
    at_edge: bool


class AskedStudy(Asked):
    """What is in study.json."""

    file: ClassVar[str] = "study.json"
    grows: ClassVar[str | None] = "study.seeds"

    study: StudyConfig
    """What the study was told."""
    configs: dict[str, TrainConfig]
    """The config of each variant, matched; seed, name and folder of a run are the study's."""
    step_s: dict[str, float] = {}
    """Seconds of a step by variant, where match=time measured them before the first run."""


class Study(Runs):
    """`folder`/study.json, and one run folder beside it for each job."""

    def __init__(self, folder: Path, asked: AskedStudy) -> None:
        super().__init__(folder, asked, asked.study.threads)
        self.config, self.variants, self.step_s = asked.study, asked.configs, asked.step_s

    @property
    def hash(self) -> str:
        """Returns the hash of what was asked, but for how many seeds: those may grow."""
        return self.asked.hash

    def missing(self) -> list[Job]:
        """As its base; tuning before what depends on it."""
        tuning = [job for name in self.variants for job in self.tuning(name) if self.result(job) is None]
        if tuning:
            return tuning
        left = [job for name in self.variants for job in self.reporting(name) if self.result(job) is None]
        if before_look := [job for job in left if job.seed < (self.config.give_up_after or 0)]:
            return before_look
        going_on = self.going_on()
        return [job for job in left if job.variant in going_on]

    def results(self, variant: str) -> dict[int, float]:
        """Returns the metric by seed, of the runs that are compared and have ended."""
        found = {job.seed: self.result(job) for job in self.reporting(variant)}
        return {seed: value for seed, value in found.items() if value is not None}

    def differences(self) -> dict[str, Difference]:
        """Returns what each variant's results say against the baseline's."""
        results = {name: self.results(name) for name in self.variants}
        baseline = results.pop(self.config.baseline)
        return differences(baseline, results, self.config.least_effect, range(self.config.give_up_after or 0))

    def going_on(self) -> set[str]:
        """Returns the variants that get all seeds: those that are not given up, and the baseline as long as there is any."""
        if self.config.give_up_after is None:
            return set(self.variants)
        left = {name for name, found in self.differences().items() if not found.given_up}
        return left | {self.config.baseline} if left else left

    def tuned(self, variant: str) -> Tuned | None:
        """Returns what tuning has found; None where nothing is tuned, and while a tuning run of the variant has no result."""
        means = self._means(self.tuning(variant))
        return _best(means) if means else None

    def reporting(self, variant: str) -> list[Job]:
        """Returns the runs that are compared; none while the variant is being tuned."""
        found = self.tuned(variant)
        if self.config.tune is not None and found is None:
            return []
        cfg = self.variants[variant] if found is None else moved(self.variants[variant], str(self.config.tune), found.best)
        return [self._job(f"{variant}-seed-{seed}", variant, seed, cfg) for seed in range(self.config.seeds)]

    def tuning(self, variant: str) -> list[Job]:
        """Returns the runs of five values around the variant's own, and of up to two more where the best so far is at an edge."""
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
            values.append(edge * (2 if edge == max(values) else 0.5))
        return jobs

    def _means(self, jobs: Sequence[Job]) -> dict[float, float] | None:
        """Mean metric by tuned value, ascending; None while a run has no result."""
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

    def _tuning_job(self, variant: str, value: float, seed: int) -> Job:
        cfg = moved(self.variants[variant], str(self.config.tune), value)
        return self._job(f"tune-{variant}-{value:.4g}-seed-{seed}", variant, seed, cfg, value)

    def _job(self, name: str, variant: str, seed: int, cfg: TrainConfig, tuned: float | None = None) -> Job:
        metric = self.config.metric if tuned is None else self.config.tuning_metric
        return Job(name, variant, seed, cfg.replace(seed=seed, run={"name": name, "dir": str(self.folder)}), metric, tuned)


def new_study(folder: Path, config: StudyConfig, variants: Mapping[str, TrainConfig], begun: AskedStudy | None = None) -> Study:
    """Returns a study of these composed configs, matched as it asks; match=time measures steps, which run, unless the study has begun.

    Raises ConfigError where two are one, a knob does not reach, or a run would train nothing or need several processes.
    """
    for name, cfg in variants.items():
        if cfg.check:
            raise ConfigError(f"variants.{name}: check=true trains nothing that could be compared. Leave it out.")
        if cfg.strategy.launched:
            raise ConfigError(
                f"variants.{name}: strategy={cfg.strategy.kind} starts ranks, and a run of a study is one process. Leave it out."
            )
    plain = {name: _tested(cfg.replace(run=NO_RUN, seed=0), config) for name, cfg in variants.items()}
    refuse_equal(plain, config.tune)
    step_s = begun.step_s if begun is not None else {}
    if config.match == "time" and begun is None:
        step_s = measured(folder / "probe", plain, config.threads)
    study = Study(folder, AskedStudy(study=config, configs=matched(config, plain, step_s), step_s=step_s))
    refuse_equal(study.variants, config.tune)
    study.missing()  # so that what cannot be tuned is told before anything is written
    return study


def _tested(cfg: TrainConfig, study: StudyConfig) -> TrainConfig:
    """With half of the held-out text set aside, where the study asks for a test and the config has none."""
    return moved(cfg, "data.test_frac", TEST_FRAC) if study.tests and not cfg.data.test_frac else cfg


def read_study(folder: Path) -> Study:
    """Returns the study of a folder as it was frozen. Raises ConfigError where there is none."""
    if (asked := AskedStudy.read(folder)) is None:
        raise ConfigError(f"{folder}: there is no study here. Start one: lm ablate study=NAME.")
    return Study(folder, asked)


def _best(means: Mapping[float, float]) -> Tuned:
    """The vertex of the parabola in log value through the best point and its neighbours; the point itself at an edge."""
    values = sorted(means)
    i = min(range(len(values)), key=lambda i: means[values[i]])
    around = [means[value] for value in values[max(0, i - 1) : i + 2]]
    if len(around) < 3 or not all(map(math.isfinite, around)):
        return Tuned(values[i], dict(means), i in (0, len(values) - 1))
    left, here, right = around
    curve = left - 2 * here + right
    shift = 0.5 * (left - right) / curve if curve > 0 else 0.0  # in steps of a factor of 2
    return Tuned(float(f"{values[i] * 2**shift:.3g}"), dict(means), False)


def refuse_equal(variants: Mapping[str, TrainConfig], tuned: str | None = None) -> None:
    """Raises ConfigError where two are one but for the tuned setting."""
    seen: dict[str, str] = {}
    for name, cfg in variants.items():
        tree = json.dumps({key: value for key, value in flatten(cfg.tree()).items() if key != tuned}, sort_keys=True)
        if tree in seen:
            rule = f"it changes nothing against {seen[tree]} that is not matched or tuned, seeds left aside"
            raise ConfigError(f"variants.{name}: {rule}. Change something else, or leave it out; seeds=5 says how many seeds.")
        seen[tree] = name
