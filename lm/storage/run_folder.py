"""Reads what a run left behind: config.yaml, metrics.jsonl, and where there are any summary.json and samples.md."""

import difflib
import json
import math
import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lm.config import Tree
from lm.errors import CheckpointError, ConfigError

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "-"})()


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


def read_run(folder: Path) -> Run:
    """A torn last line of metrics (the run was killed, or still writes) is left out. Raises ConfigError where `folder` is no run
    or has no metrics yet, CheckpointError naming the file where one is damaged."""
    if not os.path.isdir(folder):
        raise ConfigError(f"{folder}: there is no such run folder. {_neighbours(folder)}")
    if not os.path.isfile(folder / "config.yaml"):
        raise ConfigError(f"{folder}: config.yaml is missing, so this is no run folder. Give a folder that `lm train` wrote.")
    metrics = _read_metrics(folder / "metrics.jsonl")
    if not metrics:
        raise ConfigError(f"{folder}: metrics.jsonl is missing or empty, and a run needs a line of metrics to be read. Train it first.")
    summary = folder / "summary.json"
    samples = folder / "samples.md"
    return Run(
        folder=folder,
        name=folder.resolve().name,
        config=_read_config(folder / "config.yaml"),
        metrics=metrics,
        summary=_object(_text(summary), str(summary)) if summary.exists() else {},
        samples=_text(samples) if samples.exists() else "",
    )


def flatten(tree: Tree, prefix: str = "") -> Tree:
    """{"a": {"b": 1}} -> {"a.b": 1}; lists and empty trees are leaves."""
    flat: Tree = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def nest(leaves: Tree) -> Tree:
    """The tree of dotted paths."""
    tree: Tree = {}
    for path, value in leaves.items():
        *parents, last = path.split(".")
        section = tree
        for key in parents:
            if not isinstance(section.get(key), dict):  # not there yet, or null
                section[key] = {}
            section = section[key]
        section[last] = value
    return tree


def differing(flat_trees: Sequence[Tree]) -> list[str]:
    """Dotted keys, in the order first met, whose values (or presence) are not the same in all."""
    keys = dict.fromkeys(key for flat in flat_trees for key in flat)
    return [key for key in keys if any(flat.get(key, ABSENT) != flat_trees[0].get(key, ABSENT) for flat in flat_trees)]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _neighbours(folder: Path) -> str:
    try:
        names = [path.parent.name for path in folder.parent.glob("*/config.yaml")]
    except OSError:
        names = []
    near = difflib.get_close_matches(folder.name, names, n=1)
    return f"Did you mean {folder.parent / near[0]}?" if near else "Give a folder that `lm train` wrote."


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: byte {error.start} is not UTF-8, so the file is damaged. Restore it or train again.") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}), and the run needs it. Check its permissions.") from error


def _read_config(path: Path) -> Tree:
    text = _text(path)
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        first = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: not plain yaml ({first}). Restore the file that `lm train` wrote.") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: holds no mapping of keys to values. Restore the file that `lm train` wrote.")
    return tree


def _read_metrics(path: Path) -> list[Tree]:
    if not path.exists():
        return []
    lines = _text(path).split("\n")
    torn = lines.pop()
    records = [_object(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    try:
        return [*records, _object(torn, "")]
    except CheckpointError:
        return records


def _object(text: str, where: str) -> Tree:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{where}: broken JSON ({error}). Remove or restore it.") from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{where}: {text[:40]!r} is not a JSON object. Remove or restore it.")
    return record
