"""What reports and comparisons need of a run: its config, its curves and its figures."""

import difflib
import math
import os.path
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.errors import ConfigError
from lm.schema import Tree
from lm.storage.run_folder import RunFolder


@dataclass(frozen=True)
class Run:
    """A run folder's text: `metrics` holds training, validation and event lines as written, `summary` is empty until the run ends."""

    folder: Path
    name: str
    config: Tree
    metrics: list[Tree]
    summary: Tree
    samples: str

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    @property
    def events(self) -> list[Tree]:
        return [line for line in self.metrics if "event" in line]

    def series(self, key: str, against: str = "step") -> tuple[list[float], list[float]]:
        """(`against`, `key`) of each line that has finite values of both; events are left out."""
        lines = [line for line in self.metrics if "event" not in line]
        pairs = [(line[against], line[key]) for line in lines if _finite(line.get(against)) and _finite(line.get(key))]
        return [x for x, _ in pairs], [y for _, y in pairs]

    def number(self, key: str) -> float | None:
        """The summary's value, else the newest in the metrics; None where that is no finite number, as after a loss of NaN."""
        value = self.summary.get(key)
        if value is None:
            value = next((line[key] for line in reversed(self.metrics) if key in line), None)
        return value if _finite(value) else None


def read_run(path: Path) -> Run:
    """Raises ConfigError where `path` is no run or has no metrics yet, CheckpointError naming the file where one is damaged."""
    folder = RunFolder(path)
    if not os.path.isdir(path):
        raise ConfigError(f"{path}: there is no such run folder. {_neighbours(path)}")
    if not folder.exists():
        raise ConfigError(f"{path}: config.yaml is missing, so this is no run folder. Give a folder that `lm train` wrote.")
    metrics = folder.metrics.read()
    if not metrics:
        raise ConfigError(f"{path}: metrics.jsonl is missing or empty, and a run needs a line of metrics to be read. Train it first.")
    return Run(path, folder.name, folder.config(), metrics, folder.summary(), folder.samples.read())


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _neighbours(path: Path) -> str:
    try:
        names = [file.parent.name for file in path.parent.glob("*/config.yaml")]
    except OSError:
        names = []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"Did you mean {path.parent / near[0]}?" if near else "Give a folder that `lm train` wrote."
