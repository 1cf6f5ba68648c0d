"""Runs side by side in a folder: the question that they answer, frozen before the first run, and their results so far."""

import json
import math
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from lm import plugins
from lm.data.sources.fingerprint import short_hash
from lm.errors import CheckpointError, ConfigError
from lm.schema import Config, Tree, flatten, from_tree
from lm.spelling import did_you_mean
from lm.storage.atomic import replace_file
from lm.storage.formats import with_todays_keys
from lm.storage.reading import checked, read_json
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig


@dataclass(frozen=True)
class Job:
    """One training run.  metric: name of its result.  tuned: value of the tuned setting.  trunk: (name of another run, step): both runs are
    the same up to that step, so this one may start from the other's checkpoint; None: there is no such run."""

    name: str
    variant: str
    seed: int
    config: TrainConfig
    metric: str
    tuned: float | None = None
    trunk: tuple[str, int] | None = None


class Asked(Config):
    """Base of what decides runs. It stands in a file of their folder, with its hash, before the first of them starts."""

    file: ClassVar[str]
    grows: ClassVar[str | None] = None
    """Dotted path of a number that may be raised later; no part of the hash."""

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Returns what the folder's file says was asked; None where there is no file. Raises CheckpointError where the file is damaged,
        ConfigError where a config in it needs a plugin."""
        if (asked := cls.unread(folder)) is None:
            return None
        _require_plugins(asked, folder / cls.file)
        return checked(cls, with_todays_keys(asked), folder / cls.file)

    @classmethod
    def unread(cls, folder: Path) -> Tree | None:
        """Returns the same as it stands in the file, with kinds of plugins that may not be loaded. Raises as `read` does for damage."""
        path = folder / cls.file
        if not os.path.lexists(path):
            return None
        file = checked(_File, read_json(path), path)
        if file != _file(file.hash, file.asked):
            raise CheckpointError(f"{path}: the file is damaged: it is not what its seal was made of. Restore the file that lm wrote.")
        return file.asked

    @property
    def hash(self) -> str:
        """Returns a hash of all values except the one that may grow."""
        return short_hash({key: value for key, value in flatten(self.tree()).items() if key != self.grows})

    def freeze(self, folder: Path) -> None:
        """Writes the file where there is none, or where the value that may grow has grown, with copies of the plugins that the configs
        need. Raises as `agree` does."""
        self.agree(folder)
        if self.read(folder) != self:
            RunFolder(folder).write_plugins(plugins.files(self))
            replace_file(folder / self.file, json.dumps(_file(self.hash, self.tree()).tree(), indent=1))

    def agree(self, folder: Path) -> None:
        """Raises ConfigError, with the difference, where the folder's file says something else."""
        if (begun := self.read(folder)) is None:
            return
        before, now, grows = flatten(begun.tree()), flatten(self.tree()), self.grows
        if changed := [key for key in before | now if before.get(key) != now.get(key) and key != grows]:
            key = changed[0]
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            said = f"{key} was {json.dumps(before.get(key))}, now {json.dumps(now.get(key))}{more}"
            remedy = f"Give them another name; to keep the runs that stay as they are, copy the folder to it without {self.file}"
            raise ConfigError(f"{folder}: its runs have begun, and others are asked now: {said}. {remedy}.")
        if grows is not None and now[grows] < before[grows]:
            said = f"{grows.rpartition('.')[2]}={now[grows]}, and {before[grows]} were asked for before"
            raise ConfigError(f"{folder}: {said}; fewer would be a choice among results. Ask for as many, or more.")


class _File(Config):
    hash: str
    seal: str
    asked: dict[str, Any]


def _file(hash: str, asked: Tree) -> _File:
    return _File(hash=hash, seal=short_hash({"hash": hash, "asked": asked}), asked=asked)


class _Diverged(Config):
    """What is noted of a run that cannot end.  config: its hash, so that a run of another config under the same name is another one."""

    config: str


class _Failed(Config):
    """What is noted of a run that has failed, and would be tried again.  config: as in `_Diverged`."""

    config: str
    why: str


class Runs(ABC):
    """Runs in a folder, with their results.  threads: of each run."""

    def __init__(self, folder: Path, asked: Asked, threads: int) -> None:
        self.folder, self.asked, self.threads = folder, asked, threads
        self._known: dict[str, float] = {}

    @abstractmethod
    def missing(self) -> list[Job]:
        """Returns the jobs that can run now and have no result yet."""

    def freeze(self) -> None:
        """Writes into the folder what is asked. Raises ConfigError where the folder was begun with something else."""
        self.asked.freeze(self.folder)

    def run_of(self, job: Job) -> RunFolder:
        """Returns the run folder of a job, existing or not."""
        return RunFolder(self.folder / job.name)

    def file(self, job: Job, ending: str) -> Path:
        """Returns the path of a job's file, with this ending, that is kept beside its run folder."""
        return self.folder / "jobs" / f"{job.name}.{ending}"

    def result(self, job: Job) -> float | None:
        """Returns the metric of a run that has ended with exactly the job's config; inf where it diverged, None where it has not ended.

        Raises ConfigError where the run's summary lacks the metric.
        """
        if job.name not in self._known and (found := self._read(job)) is not None:
            self._known[job.name] = found
        return self._known.get(job.name)

    def _read(self, job: Job) -> float | None:
        if self._has_diverged(job):
            return math.inf
        run = self.run_of(job)
        if (summary := run.ended(job.config.tree(), lambda saved: from_tree(type(job.config), saved).tree())) is None:
            return None
        if not isinstance(found := summary.get(job.metric), int | float):
            known = [key for key, value in summary.items() if isinstance(value, float)]
            raise ConfigError(f"metric={job.metric}: {run.path} has no such figure. {did_you_mean(job.metric, known)}")
        return float(found)

    def note_diverged(self, job: Job) -> None:
        """Records that a run's loss or weights became non-finite."""
        replace_file(self.file(job, "diverged.json"), json.dumps(_Diverged(config=_config_hash(job)).tree()))

    def note_failed(self, job: Job, why: str) -> None:
        """Records the last line of a run that broke."""
        replace_file(self.file(job, "failed.json"), json.dumps(_Failed(config=_config_hash(job), why=why).tree()))

    def why_failed(self, job: Job) -> str | None:
        """Returns why a run broke that has not ended since; None where it has ended, or none is known to have broken."""
        path = self.file(job, "failed.json")
        if not os.path.lexists(path) or self.result(job) is not None:
            return None
        noted = checked(_Failed, read_json(path), path)
        return noted.why if noted.config == _config_hash(job) else None

    def _has_diverged(self, job: Job) -> bool:
        path = self.file(job, "diverged.json")
        return os.path.lexists(path) and checked(_Diverged, read_json(path), path).config == _config_hash(job)


def _require_plugins(asked: Tree, path: Path) -> None:
    """Raises ConfigError unless the plugins of all configs in a tree are loaded, and the same."""
    if "trainer" in asked:
        plugins.require(asked, path)
    for each in asked.values():
        if isinstance(each, dict):
            _require_plugins(each, path)


def _config_hash(job: Job) -> str:
    return short_hash(job.config.tree() | {"run": {}})
