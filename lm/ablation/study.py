"""A study on disk: frozen before its first run, and the runs that it asks for."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lm.ablation.config import FILE, StudyConfig, begun
from lm.ablation.matching import matched, moved
from lm.errors import ConfigError
from lm.schema import Tree, flatten, from_tree
from lm.storage.atomic import disk_errors, replace_file
from lm.storage.reading import read_json
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig

_DIVERGED = "diverged.json"
_NO_RUN = {"name": "any", "dir": "any"}
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_EXTENSIONS = 2  # further factors of 2 where the best is at an edge


@dataclass(frozen=True)
class Job:
    """One training run of a study.  tuned: the value of the tuned setting."""

    name: str
    variant: str
    seed: int
    config: TrainConfig
    tuned: float | None = None


@dataclass(frozen=True)
class Tuned:
    """The best value of a variant, and what was tried: value -> mean metric, infinite where a run diverged."""

    best: float
    tried: dict[float, float]
    at_edge: bool


class Runs:
    """Runs side by side in a folder, and what has come out so far.  threads: of each."""

    def __init__(self, folder: Path, metric: str, threads: int) -> None:
        self.folder, self.metric, self.threads = folder, metric, threads
        self._diverged = folder / _DIVERGED

    def missing(self) -> list[Job]:
        """Returns the jobs that can run now and have no result yet."""
        raise NotImplementedError

    def result(self, job: Job) -> float | None:
        """Returns the metric of a run that has ended with this very config; infinite where it diverged, None where it has not run.

        Raises ConfigError where its summary lacks the metric.
        """
        if job.name in self.diverged():
            return math.inf
        run = RunFolder(self.folder / job.name)
        if (summary := run.ended(job.config.tree())) is None:
            return None
        if not isinstance(found := summary.get(self.metric), int | float):
            known = ", ".join(key for key, value in summary.items() if isinstance(value, float))
            raise ConfigError(f"metric={self.metric}: {run.path} has no such figure. Options: {known}.")
        return float(found)

    def diverged(self) -> list[str]:
        """Returns the names of the runs whose loss or weights were no numbers any more."""
        return list(read_json(self._diverged)["runs"]) if self._diverged.is_file() else []

    def note_diverged(self, job: Job) -> None:
        """Remembers the outcome of a run that cannot end."""
        replace_file(self._diverged, json.dumps({"runs": sorted({*self.diverged(), job.name})}))


class Study(Runs):
    """`folder`/study.json, and one run folder beside it for each job."""

    def __init__(self, folder: Path, config: StudyConfig, variants: Mapping[str, TrainConfig]) -> None:
        """variants: the config of each, matched; seed, name and folder of a run are the study's."""
        super().__init__(folder, config.metric, config.threads)
        self.config, self.variants = config, dict(variants)

    @cached_property
    def hash(self) -> str:
        """Returns the hash of what was asked, but for how many seeds: those may grow."""
        return hashlib.sha256(json.dumps(self._asked(), sort_keys=True).encode()).hexdigest()[:16]

    def freeze(self) -> None:
        """Writes study.json, or compares with the one that is there. Raises ConfigError, with the difference, where another was asked."""
        path = self.folder / FILE
        if path.is_file():
            before, now = flatten(read_json(path)["asked"]), flatten(json.loads(json.dumps(self._asked())))
            if changed := [key for key in before | now if before.get(key) != now.get(key)]:
                key = changed[0]
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                said = f"{key} was {json.dumps(before.get(key))}, now {json.dumps(now.get(key))}{more}"
                raise ConfigError(f"{self.folder}: the study has begun, and another is asked now: {said}. Give it another name.")
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"hash": self.hash, "seeds": self.config.seeds, "asked": self._asked()}, indent=1))

    def missing(self) -> list[Job]:
        """As its base; tuning before what depends on it."""
        tuning = [job for name in self.variants for job in self._tuning(name) if self.result(job) is None]
        if tuning:
            return tuning
        return [job for name in self.variants for job in self.reporting(name) if self.result(job) is None]

    def tuned(self, variant: str) -> Tuned | None:
        """Returns what tuning has found; None where nothing is tuned. All of its runs must have ended."""
        return _best(self._means(self._tuning(variant))) if self.config.tune is not None else None

    def reporting(self, variant: str) -> list[Job]:
        """Returns the runs that are compared."""
        found = self.tuned(variant)
        cfg = self.variants[variant] if found is None else moved(self.variants[variant], str(self.config.tune), found.best)
        return [self._job(f"{variant}-seed-{seed}", variant, seed, cfg) for seed in range(self.config.seeds)]

    def _tuning(self, variant: str) -> list[Job]:
        """Five values around the variant's own, and up to two more where the best so far is at an edge."""
        if self.config.tune is None:
            return []
        values = [self._own(variant) * factor for factor in FACTORS]
        for extended in range(_EXTENSIONS + 1):
            jobs = [self._tuning_job(variant, value, seed) for value in values for seed in self.config.tune_seeds]
            if extended == _EXTENSIONS or any(self.result(job) is None for job in jobs):
                break
            means = self._means(jobs)
            edge = min(means, key=lambda value: means[value])
            if edge not in (min(values), max(values)):
                break
            values.append(edge * (2 if edge == max(values) else 0.5))
        return jobs

    def _means(self, jobs: Sequence[Job]) -> dict[float, float]:
        """Mean metric by tuned value."""
        found: dict[float, list[float]] = {}
        for job in jobs:
            result = self.result(job)
            found.setdefault(job.tuned or 0.0, []).append(math.inf if result is None else result)
        return {value: sum(found[value]) / len(found[value]) for value in sorted(found)}

    def _own(self, variant: str) -> float:
        value = flatten(self.variants[variant].tree()).get(str(self.config.tune))
        if not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"tune={self.config.tune}: variant {variant} has no such positive number. Name one that every variant has.")
        return float(value)

    def _tuning_job(self, variant: str, value: float, seed: int) -> Job:
        cfg = moved(self.variants[variant], str(self.config.tune), value)
        return self._job(f"tune-{variant}-{value:.4g}-seed-{seed}", variant, seed, cfg, value)

    def _job(self, name: str, variant: str, seed: int, cfg: TrainConfig, tuned: float | None = None) -> Job:
        return Job(name, variant, seed, cfg.replace(seed=seed, run={"name": name, "dir": str(self.folder)}), tuned)

    def _asked(self) -> Tree:
        study = {key: value for key, value in self.config.tree().items() if key != "seeds"}
        return {"study": study, "configs": {name: cfg.tree() for name, cfg in self.variants.items()}}


def new_study(folder: Path, config: StudyConfig, variants: Mapping[str, TrainConfig]) -> Study:
    """Returns a study of these composed configs, matched as it asks. Raises ConfigError where two are one, a knob does not reach, or a
    run would need several processes."""
    for name, cfg in variants.items():
        if cfg.strategy.launched:
            raise ConfigError(
                f"variants.{name}: strategy={cfg.strategy.kind} starts ranks, and a run of a study is one process. Leave it out."
            )
    plain = {name: cfg.replace(run=_NO_RUN, seed=0) for name, cfg in variants.items()}
    _refuse_equal(plain)
    study = Study(folder, config, matched(config, plain))
    study.missing()  # so that what cannot be tuned is told before anything is written
    return study


def read_study(folder: Path) -> Study:
    """Returns the study of a folder as it was frozen. Raises ConfigError where there is none."""
    if not begun(folder):
        raise ConfigError(f"{folder}: there is no study here. Start one: lm ablate study=NAME.")
    path = folder / FILE
    tree = read_json(path)
    config = from_tree(StudyConfig, {**tree["asked"]["study"], "seeds": tree["seeds"]}, str(path))
    return Study(folder, config, {name: from_tree(TrainConfig, cfg, str(path)) for name, cfg in tree["asked"]["configs"].items()})


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


def _refuse_equal(variants: Mapping[str, TrainConfig]) -> None:
    seen: dict[str, str] = {}
    for name, cfg in variants.items():
        tree = json.dumps(cfg.tree(), sort_keys=True)
        if tree in seen:
            raise ConfigError(f"variants.{name}: it changes nothing against {seen[tree]}. Change something, or leave it out.")
        seen[tree] = name
