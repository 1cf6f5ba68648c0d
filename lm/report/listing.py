"""What runs there are: how far each is, its figures and its size, without reading all of its metrics."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lm.errors import LmError
from lm.schema import Tree, flatten
from lm.storage.run_folder import NOT_FINITE, RunFolder

_FIGURES = ("val_reward", "val_pair_loss", "val_answer_loss", "val_bits_per_byte", "val_loss")  # that a run is told by, the first it has


@dataclass(frozen=True)
class Listed:
    """A run as it lies there.  state: ended, stopped early, diverged, or how far it is.  metric, value: None before a validation.
    n_bytes, checkpoint_bytes: of all its files, and of the checkpoints alone.  changed: seconds since 1970, of its newest file."""

    name: str
    state: str
    objective: str
    init_from: str | None
    parameters: int | None
    metric: str | None
    value: float | None
    n_bytes: int
    checkpoint_bytes: int
    changed: float

    @classmethod
    def of(cls, path: Path) -> "Listed":
        """Reads a run. Raises CheckpointError naming a file that is damaged or cannot be read."""
        folder = RunFolder(path)
        config, summary = flatten(folder.config()), folder.summary()
        newest = folder.metrics.newest('"val_' if summary else "")  # a run that has ended is read for its figures alone, which is quick
        told = [*([summary] if summary else []), *reversed(newest)]
        sizes = dict(_files(path))
        figures = ((key, line[key]) for key in _FIGURES for line in told if isinstance(line.get(key), int | float))
        metric, value = next(figures, (None, None))
        return cls(
            name=str(path),
            state=_state(config, summary, told),
            objective=str(config.get("objective.kind", "-")),
            init_from=config.get("init_from"),
            parameters=n if isinstance(n := summary.get("parameters"), int) else None,
            metric=metric,
            value=value,
            n_bytes=sum(found.st_size for found in sizes.values()),
            checkpoint_bytes=sum(found.st_size for file, found in sizes.items() if folder.checkpoints in file.parents),
            changed=max((found.st_mtime for found in sizes.values()), default=0.0),
        )


def listed(folders: list[Path]) -> tuple[list[Listed], list[str]]:
    """Returns the runs of these folders, the one that changed last at the end, and a sentence on each that cannot be read."""
    found, refused = [], []
    for path in {path.resolve(): path for path in reversed(folders)}.values():  # one that is there twice counts once
        try:
            found.append(Listed.of(path))
        except (LmError, OSError) as error:
            refused.append(" ".join(str(error).split()))
    return sorted(found, key=lambda run: run.changed), refused


def _state(config: Tree, summary: Tree, told: list[Tree]) -> str:
    if summary:
        return f"{'stopped early at' if summary.get('stopped_early') else 'ended at'} step {summary['steps']:,}"
    step, most = next((line["step"] for line in told if isinstance(line.get("step"), int)), 0), config.get("trainer.max_steps")
    start = "diverged at " if told and told[0].get("event") == NOT_FINITE else ""
    return f"{start}step {step:,} of {most:,}" if isinstance(most, int) else f"{start}step {step:,}"


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for parent, _, names in os.walk(folder):
        for path in (Path(parent) / name for name in names):
            with suppress(OSError):  # a run that goes on removes checkpoints
                yield path, path.lstat()
