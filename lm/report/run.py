"""Reads a run for reports and comparisons: its config, its curves and its final numbers."""

import glob
import math
import os.path
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lm.errors import ConfigError
from lm.schema import Tree
from lm.storage.run_folder import RunFolder, nearest_run

Axis = Literal["step", "tokens", "flops", "time"]
"""What a curve is drawn against."""


@dataclass(frozen=True)
class Run:
    """The content of a run folder: `metrics` are the training, validation and event lines; `summary` is empty until the run ends."""

    folder: Path
    name: str
    config: Tree
    metrics: list[Tree]
    summary: Tree
    samples: str
    seconds: Mapping[int, float] | None = None
    """Of training up to a step, where the run is `thinned` for the axis of time."""

    def thinned(self, against: Axis) -> "Run":
        """Returns the run without its lines of training, 600 bytes each, but for the newest of each figure: `number` and the curves of what
        is held out stay as they are."""
        newest = {key: number for number, line in enumerate(self.metrics) if self._told(line) for key in line}
        told = {*newest.values()}
        kept = [line for number, line in enumerate(self.metrics) if "loss" not in line or "event" in line or number in told]
        seconds = {line["step"]: self._seconds(line["step"]) for line in kept} if against == "time" else None
        return replace(self, metrics=kept, seconds=seconds)

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    @property
    def events(self) -> list[Tree]:
        return [line for line in self.metrics if "event" in line]

    def series(self, key: str, against: Axis = "step") -> tuple[list[float], list[float]]:
        """Returns the values of `against` and of `key`, of the lines that have finite values of both; events are left out."""
        points = self.points(key, against)
        return [x for x, _ in points.values()], [y for _, y in points.values()]

    def points(self, key: str, against: Axis = "step") -> dict[int, tuple[float, float]]:
        """Returns the same as `series`, as pairs by step."""
        lines = [line for line in self.metrics if "event" not in line and _finite(line.get(key))]
        return {line["step"]: (x, line[key]) for line in lines if (x := self._place(line, against)) is not None}

    def _place(self, line: Tree, against: Axis) -> float | None:
        """Returns a line's value on an axis; None where it is not known. Besides step and tokens: training FLOPs of the tokens, known once
        the run has ended; seconds of all steps so far, without validations and saves."""
        if against == "time":
            return self._seconds(line["step"]) if self.seconds is None else self.seconds.get(line["step"])
        per_token = self.number("flops_per_token") if against == "flops" else 1
        place: Any = line.get("tokens" if against == "flops" else against)
        return place * per_token if _finite(place) and per_token is not None else None

    def _seconds(self, step: int) -> float:
        """Returns the seconds of the steps up to this one."""
        ends, passed, each = self._clock
        at = bisect_left(ends, step)
        return passed[-1] if at == len(ends) else passed[at - 1] + each[at] * (step - ends[at - 1]) if at else 0.0

    @cached_property
    def _clock(self) -> tuple[list[int], list[float], list[float]]:
        """Returns steps, the seconds of all steps up to each, and those of one step since the one before: a line's `step_s` counts for all
        steps since the line before."""
        ends, passed, each = [0], [0.0], [0.0]
        for line in self.metrics:
            if _finite(line.get("step_s")) and line["step"] > ends[-1]:
                passed.append(passed[-1] + line["step_s"] * (line["step"] - ends[-1]))
                ends.append(line["step"])
                each.append(line["step_s"])
        return ends, passed, each

    def number(self, key: str) -> float | None:
        """Returns the summary's value, else the newest in the metrics up to the model that was handed on; None where that is not finite, as
        after a loss of NaN."""
        if (value := self.summary.get(key)) is None:
            value = next((line[key] for line in reversed(self.metrics) if key in line and self._told(line)), None)
        return value if _finite(value) else None

    def _told(self, line: Tree) -> bool:
        """Whether a line's figures are of the model that was handed on, or of one before it."""
        last = self.summary.get("model_step")
        return last is None or bool(line.get("step", 0) <= last)


def read_run(path: Path) -> Run:
    """Reads a run. Raises ConfigError where `path` is no run or has no metrics yet, CheckpointError naming a damaged file."""
    folder = RunFolder(path)
    if not os.path.isdir(path):
        raise ConfigError(f"{path}: there is no such run folder. {nearest_run(path)}")
    if not folder.exists():
        raise ConfigError(f"{path}: config.yaml is missing, so this is no run folder. Give a folder that `lm train` wrote.")
    metrics = folder.metrics.read()
    if not metrics:
        raise ConfigError(f"{path}: metrics.jsonl is missing or empty, and a run needs a line of metrics to be read. Train it first.")
    return Run(path, folder.name, folder.config(), metrics, folder.summary(), folder.samples.read())


def run_folders(path: Path) -> list[Path]:
    """Returns the folder itself where it is a run, and all runs below it, as in a sweep's folder; for a glob those of all matches."""
    if not path.exists() and glob.has_magic(str(path)):
        return [found for name in sorted(glob.glob(str(path))) for found in run_folders(Path(name))]
    if not path.is_dir():
        return [path]
    found = [run for child in sorted(path.iterdir()) if child.is_dir() for run in run_folders(child) if RunFolder(run).exists()]
    return [path, *found] if RunFolder(path).exists() or not found else found


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
