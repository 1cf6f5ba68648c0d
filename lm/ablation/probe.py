"""Measures what a step of each variant takes on this machine, by short runs in turns, before a study begins."""

import statistics
import time
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from lm.ablation.running.jobs import Here, run_missing
from lm.ablation.runs import Asked, Job, Runs
from lm.errors import ConfigError
from lm.schema import Tree, from_tree
from lm.storage.atomic import TEMPORARY, remove
from lm.training.config import TrainConfig

_TURNS, _STEPS, _WARM_UP = 3, 10, 4  # runs of each variant, steps of a run, and first steps of a run that do not count


class AskedProbe(Asked):
    """What is in probe.json."""

    file = "probe.json"

    threads: int = Field(ge=1, le=1024)
    configs: dict[str, TrainConfig]
    turns: int = Field(_TURNS, ge=1)


class Tried(NamedTuple):
    """What a variant takes."""

    step_s: float
    memory_gib: float
    """At its process's peak."""
    start_s: float
    """Of a run beside its steps."""


class Probe(Runs):
    """A few steps of each variant, then again of each, so that a busy minute of the machine slows all alike."""

    def __init__(self, folder: Path, asked: AskedProbe) -> None:
        super().__init__(folder, asked, asked.threads)
        self._configs, self._turns = asked.configs, asked.turns

    def missing(self) -> list[Job]:
        return [job for turn in range(self._turns) for name in self._configs if self.result(job := self._job(name, turn)) is None]

    def step_s(self, name: str) -> float:
        """Returns the median of a variant's seconds per step; their mean where not every step draws answers. Raises ConfigError where no
        step was measured."""
        laps = [record["step_s"] for record in self._records(name) if "step_s" in record and record["step"] > _WARM_UP]
        middle = statistics.median if self._configs[name].objective.updates_of_rows() == 1 else statistics.fmean
        if not laps or not (found := middle(laps)):
            raise ConfigError(f"match=time: variant {name} has no step that could be timed. Look into {self.folder}, or match otherwise.")
        return float(found)

    def memory_gib(self, name: str) -> float:
        """Returns a variant's highest peak."""
        return max((record["memory_gib"] for record in self._records(name) if "memory_gib" in record), default=0.0)

    def _records(self, name: str) -> list[Tree]:
        runs = [self.run_of(self._job(name, turn)) for turn in range(self._turns)]
        return [record for run in runs for record in run.metrics.read()]

    def _job(self, name: str, turn: int) -> Job:
        tree = self._configs[name].tree()
        tree |= {"run": {"name": f"{name}-turn-{turn}", "dir": str(self.folder)}, "seed": turn, "logger": {"kind": "jsonl"}}
        tree["trainer"] |= {"max_steps": _STEPS, "log_every": 1, "sample_prompts": []}
        tree["schedule"] |= {"warmup_steps": 0}
        tree["data"] |= {"val_rows": 1, "ramp": []}
        tree["checkpoint"] |= {"every": _STEPS, "keep_last": 1, "keep_steps": []}
        return Job(tree["run"]["name"], name, turn, from_tree(TrainConfig, tree), "train_s")


def measured(folder: Path, configs: dict[str, TrainConfig], threads: int) -> dict[str, float]:
    """Returns the seconds per step by variant, from runs in this folder; runs that have ended there before are not repeated."""
    probe = Probe(folder, AskedProbe(threads=threads, configs=configs))
    run_missing(probe, Here(1))
    return {name: probe.step_s(name) for name in configs}


def tried(study: Path, configs: dict[str, TrainConfig], threads: int) -> dict[str, Tried]:
    """Returns what a step of each variant takes, from one short run of each, beside the study's folder and removed again. Raises LmError
    where a run fails, as that of the study would."""
    folder = study.parent / f"{TEMPORARY}plan-{study.name}"
    probe = Probe(folder, AskedProbe(threads=threads, configs=configs, turns=1))
    try:
        started = time.monotonic()
        run_missing(probe, Here(1))
        run_s, step_s = (time.monotonic() - started) / len(configs), {name: probe.step_s(name) for name in configs}
        start_s = max(0.0, run_s - _STEPS * statistics.mean(step_s.values()))
        return {name: Tried(step_s[name], probe.memory_gib(name), start_s) for name in configs}
    finally:
        remove(folder)
