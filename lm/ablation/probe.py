"""Measures how long a step of each variant takes on this machine, by short runs in turns, before a study begins."""

import statistics
from pathlib import Path

from pydantic import Field

from lm.ablation.running.jobs import Here, run_missing
from lm.ablation.runs import Asked, Job, Runs
from lm.errors import ConfigError
from lm.schema import from_tree
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig

_TURNS, _STEPS, _WARM_UP = 3, 10, 4  # runs of each variant, steps of a run, and first steps of a run that do not count


class AskedProbe(Asked):
    """What is in probe.json."""

    file = "probe.json"

    threads: int = Field(ge=1, le=1024)
    configs: dict[str, TrainConfig]


class Probe(Runs):
    """A few steps of each variant, then again of each, so that a busy minute of the machine slows all alike."""

    def __init__(self, folder: Path, asked: AskedProbe) -> None:
        super().__init__(folder, asked, asked.threads)
        self._configs = asked.configs

    def missing(self) -> list[Job]:
        return [job for turn in range(_TURNS) for name in self._configs if self.result(job := self._job(name, turn)) is None]

    def step_s(self, name: str) -> float:
        """Returns the median of a variant's seconds per step. Raises ConfigError where no step was measured."""
        runs = [RunFolder(self.folder / self._job(name, turn).name) for turn in range(_TURNS)]
        laps = [record["step_s"] for run in runs for record in run.metrics.read() if "step_s" in record and record["step"] > _WARM_UP]
        if not laps or not (median := statistics.median(laps)):
            raise ConfigError(f"match=time: variant {name} has no step that could be timed. Look into {self.folder}, or match otherwise.")
        return float(median)

    def _job(self, name: str, turn: int) -> Job:
        tree = self._configs[name].tree()
        tree |= {"run": {"name": f"{name}-turn-{turn}", "dir": str(self.folder)}, "seed": turn, "logger": {"kind": "jsonl"}}
        tree["trainer"] |= {"max_steps": _STEPS, "log_every": 1, "sample_prompts": []}
        tree["schedule"] |= {"warmup_steps": 0}
        tree["data"] |= {"val_rows": 1}
        tree["checkpoint"] |= {"every": _STEPS, "keep_last": 1, "keep_steps": []}
        return Job(tree["run"]["name"], name, turn, from_tree(TrainConfig, tree), "train_s")


def measured(folder: Path, configs: dict[str, TrainConfig], threads: int) -> dict[str, float]:
    """Returns the seconds per step by variant, from runs in this folder; runs that have ended there before are not repeated."""
    probe = Probe(folder, AskedProbe(threads=threads, configs=configs))
    run_missing(probe, Here(1))
    return {name: probe.step_s(name) for name in configs}
