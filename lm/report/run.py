"""Reads a run for reports and comparisons: its config, its curves and its final numbers."""

import glob
import math
import os.path
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lm.errors import ConfigError
from lm.schema import Tree, from_tree
from lm.storage.reading import closed, require_open
from lm.storage.run_folder import NOT_FINITE, RunFolder, nearest_run

if TYPE_CHECKING:
    from lm.losses.measure import Measure

Axis = Literal["step", "tokens", "flops", "time"]
"""What a curve is drawn against."""
_NUMBERS = (int, float)


@dataclass(frozen=True)
class Run:
    """The content of a run folder: `metrics` are the lines of validations and events, and of training those in `trained`, or all of them;
    `summary` is empty until the run ends."""

    folder: Path
    name: str
    config: Tree
    metrics: list[Tree]
    summary: Tree
    samples: str
    trained: Mapping[tuple[str, ...], "array[float]"] = field(default_factory=dict)
    """Lines of training that `metrics` is without, those of the same figures in one table: the line's number and its figures, 8 bytes each,
    where a line there takes 600. NaN: null."""
    seconds: Mapping[int, float] | None = None
    """Of training up to a step, where the run is `thinned` for the axis of time."""

    def with_lines(self, lines: Iterable[Tree]) -> "Run":
        """Returns the run with the lines of its metrics, those of training as columns, but for the newest of the same figures: `number`
        tells the same as of all lines."""
        kept: list[tuple[int, Tree]] = []
        newest: dict[tuple[str, ...], tuple[int, Tree]] = {}
        trained: defaultdict[tuple[str, ...], array[float]] = defaultdict(lambda: array("d"))
        for number, line in enumerate(lines):
            if "loss" not in line or "event" in line:
                kept.append((number, line))
                continue
            names = tuple(line)
            trained[names].extend([number, *(value if isinstance(value, _NUMBERS) else math.nan for value in line.values())])
            if self._told(line):
                newest[names] = number, line
        return replace(self, metrics=[line for _, line in sorted([*kept, *newest.values()], key=itemgetter(0))], trained=trained)

    def thinned(self, against: Axis) -> "Run":
        """Returns the run without its curves of training: `number` and the curves of what is held out stay as they are."""
        seconds = {line["step"]: self._seconds(line["step"]) for line in self.metrics} if against == "time" else None
        return replace(self, trained={}, seconds=seconds)

    @cached_property
    def measure(self) -> "Measure":
        """How the run's objective measures, and in which units; where the objective is not known, as for text. Options that lm no longer
        has are ignored."""
        from lm.data.kinds import ObjectiveConfig  # imports torch, which comparisons do without
        from lm.losses.measure import Measure

        tree = self.config.get("objective") or {}
        kind = ObjectiveConfig.kinds().get(str(tree.get("kind")))
        if kind is None:
            return Measure()
        return from_tree(kind, {key: value for key, value in tree.items() if key in kind.model_fields}).measure(None)

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    @property
    def diverged(self) -> bool:
        """Whether it ended with a loss or gradient that is not finite, and was not resumed since."""
        return not self.finished and self.metrics[-1:] != [] and self.metrics[-1].get("event") == NOT_FINITE

    @property
    def events(self) -> list[Tree]:
        return [line for line in self.metrics if "event" in line]

    def series(self, key: str, against: Axis = "step") -> tuple[list[float], list[float]]:
        """Returns the values of `against` and of `key`, of the lines that have finite values of both; events are left out."""
        if any(key in names for names in self.trained):
            return self._of_training(key, against)[1:]
        points = self.points(key, against)
        return [x for x, _ in points.values()], [y for _, y in points.values()]

    def points(self, key: str, against: Axis = "step") -> dict[int, tuple[float, float]]:
        """Returns the same as `series`, as pairs by step."""
        if any(key in names for names in self.trained):
            steps, *values = self._of_training(key, against)
            return dict(zip(steps, zip(*values, strict=True), strict=True))
        lines = [line for line in self.metrics if "event" not in line and _finite(line.get(key))]
        return {line["step"]: (x, line[key]) for line in lines if (x := self._place(line, against)) is not None}

    def _of_training(self, key: str, against: Axis) -> tuple[list[int], list[float], list[float]]:
        """Returns steps and the values of both, by ascending step; of lines of the same step the last one counts."""
        step, x, y = self._columns("step", "tokens" if against == "flops" else "step" if against == "time" else against, key)
        if against == "time":
            x = np.array([self._seconds(int(each)) for each in step])
        if against == "flops":
            x = x * (self.number("flops_per_token") or np.nan)
        there = np.flatnonzero(np.isfinite(x) & np.isfinite(y))[::-1]
        there = there[np.unique(step[there], return_index=True)[1]]
        return step[there].astype(int).tolist(), x[there].tolist(), y[there].tolist()

    def _columns(self, *keys: str) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
        """Returns figures of the lines of `trained`, a row for each key; NaN where a line has none."""
        rows = []
        for names, values in self.trained.items():
            table = dict(zip(("", *names), np.frombuffer(values).reshape(-1, 1 + len(names)).T, strict=True))
            rows.append([table[key] if key in table else np.full(len(table[""]), np.nan) for key in ("", *keys)])
        found = np.concatenate(rows, axis=1) if rows else np.empty((1 + len(keys), 0))
        return found[1:, found[0].argsort()]

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
    def _clock(self) -> tuple[list[float], list[float], list[float]]:
        """Returns steps, the seconds of all steps up to each, and those of one step since the one before: a line's `step_s` counts for all
        steps since the line before."""
        ends, passed, each = [0.0], [0.0], [0.0]
        lines: Iterable[tuple[Any, Any]] = ((line["step"], line.get("step_s")) for line in self.metrics)
        for step, step_s in chain(zip(*self._columns("step", "step_s").tolist(), strict=True), lines):
            if _finite(step_s) and step > ends[-1]:
                passed.append(passed[-1] + step_s * (step - ends[-1]))
                ends.append(step)
                each.append(step_s)
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
    """Reads a run. Raises ConfigError where `path` is no run or has no metrics yet, CheckpointError naming what is damaged or closed."""
    folder = RunFolder(path)
    require_open(path)
    if not os.path.isdir(path):
        raise ConfigError(f"{path}: there is no such run folder. {nearest_run(path)}")
    if not folder.exists():
        raise ConfigError(f"{path}: config.yaml is missing, so this is no run folder. Give a folder that `lm train` wrote.")
    run = Run(path, folder.name, folder.config(), [], folder.summary(), folder.samples.read()).with_lines(folder.metrics.each())
    if not run.metrics and not run.trained:
        raise ConfigError(f"{path}: metrics.jsonl is missing or empty, and a run needs a line of metrics to be read. Train it first.")
    return run


def run_folders(path: Path) -> list[Path]:
    """Returns the folder itself where it is a run, and all runs below it, as in a sweep's folder; for a glob those of all matches. What
    cannot be read is among them."""
    if not os.path.exists(path) and glob.has_magic(str(path)):
        return [found for name in sorted(glob.glob(str(path))) for found in run_folders(Path(name))]
    if closed(path) or not path.is_dir():
        return [path]
    found = [
        run for child in sorted(path.iterdir()) if child.is_dir() for run in run_folders(child) if closed(run) or RunFolder(run).exists()
    ]
    return [path, *found] if RunFolder(path).exists() or not found else found


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
