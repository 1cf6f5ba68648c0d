"""The files of a run folder `runs/NAME/`: only this module names, writes and reads them."""

import contextlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from sys import intern
from typing import Any, Self

from lm.errors import CheckpointError, LmError
from lm.plugins import COPIES
from lm.schema import Tree
from lm.spelling import nearest
from lm.storage.atomic import disk_errors, replace_file
from lm.storage.formats import with_todays_keys
from lm.storage.lock import LOCK, RunLock
from lm.storage.manifest import MANIFEST, listed_files, unlisted_files, verify
from lm.storage.reading import never_waiting, parse_json, read_end, read_json, read_lines, read_yaml, yaml_text

_NEWEST_MIB = 16  # of samples
NOT_FINITE = "not finite"
"""The event of a run that a loss or gradient has ended."""
log = logging.getLogger("lm")


class RunFolder:
    """The files of a run, which need not exist yet. Reading raises CheckpointError naming the file, writing ResourceError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file, self._summary = path / "config.yaml", path / "summary.json"
        self._report, self._documents = path / "report.html", path / "test_documents.json"
        self.metrics, self.samples = Metrics(path / "metrics.jsonl"), Samples(path / "samples.md")
        self.checkpoints, self.model = path / "checkpoints", path / "model"

    def __fspath__(self) -> str:
        """Returns the path, so that a run can be given wherever a path can."""
        return str(self.path)

    __str__ = __fspath__

    @classmethod
    def around(cls, path: Path) -> Self | None:
        """Returns the run that a folder is, or that its model or checkpoint lies in."""
        folders = (cls(parent) for parent in (path, *path.absolute().parents[:2]))
        return next((folder for folder in folders if folder.exists()), None)

    @classmethod
    def of(cls, run: Tree) -> Self:
        """Returns the folder that the section `run` of a config names."""
        return cls(Path(os.path.expanduser(run["dir"])) / run["name"])

    @property
    def name(self) -> str:
        """The folder's own name, whichever way leads to it."""
        return self.path.resolve().name

    def exists(self) -> bool:
        """Whether a config has been frozen here."""
        return os.path.exists(self.config_file)  # False also for names that the system refuses

    def is_new(self) -> bool:
        """Whether there is nothing here yet, but perhaps the lock of a start that was killed."""
        if not os.path.lexists(self.path):
            return True
        return self.path.is_dir() and not self.path.is_symlink() and {file.name for file in self.path.iterdir()} <= {LOCK}

    def config(self) -> Tree:
        """Returns the frozen config.yaml."""
        return with_todays_keys(read_yaml(self.config_file))

    def write_config(self, tree: Tree) -> None:
        """Writes the file that every rank reads."""
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self.config_file, yaml_text(tree))

    def write_plugins(self, files: dict[str, bytes]) -> None:
        """Writes copies of the code of plugins, which nothing reads by itself."""
        for name, code in files.items():
            with disk_errors(self.path):
                (self.path / COPIES).mkdir(parents=True, exist_ok=True)
            replace_file(self.path / COPIES / name, code)

    def summary(self) -> Tree:
        """Returns what the end of the run wrote; {} until then."""
        if not os.path.lexists(self._summary):
            return {}
        summary = read_json(self._summary)
        if type(summary.get("steps")) is not int:
            raise CheckpointError(f"{self._summary}: the file is damaged: it says no number of steps. Train again to write it anew.")
        return summary

    def ended(self, config: Tree, whole: Callable[[Tree], Tree] = dict) -> Tree | None:
        """Returns the summary of a run that has ended with this very config, wherever it lies by now, and whose model verifies; None for
        all others.

        whole: gives a saved config the defaults of keys that were added since. It raises LmError for one that is not valid today.
        """
        try:
            if not self.exists() or not (summary := self.summary()) or whole(self.config()) | {"run": {}} != config | {"run": {}}:
                return None
            verify(self.model)
        except LmError:
            return None
        return summary

    def require_own_model(self) -> None:
        """Raises CheckpointError naming a file in the model's folder, which the end of a run replaces, that lm did not write. Of a model
        without its manifest that cannot be told."""
        if os.path.lexists(self.model / "config.json") and not os.path.lexists(self.model / MANIFEST):
            return
        try:
            listed = listed_files(self.model) if os.path.lexists(self.model / MANIFEST) else {}
        except CheckpointError:  # it is damaged, and what it has listed cannot be told
            return
        if others := unlisted_files(self.model, listed):
            fault = "lm did not write the file, and the end of the run replaces its folder"
            raise CheckpointError(f"{self.model / others[0]}: {fault}. Move it elsewhere.")

    def nothing_to_do(self, summary: Tree) -> str:
        """Returns the message for a run that has ended already."""
        return f"{self.path}: finished already at step {summary['steps']:,}; nothing to do."

    def write_summary(self, tree: Tree) -> None:
        """Writes summary.json, which marks the run as ended."""
        replace_file(self._summary, json.dumps(without_nan(tree), indent=1, allow_nan=False, ensure_ascii=False))

    def write_test_documents(self, tree: Tree) -> None:
        """Writes test_documents.json: the test's sums for each document."""
        replace_file(self._documents, json.dumps(without_nan(tree), allow_nan=False))

    def test_documents(self) -> tuple[Path, Tree] | None:
        """Returns test_documents.json, its path and its content; None where there was no test."""
        return (self._documents, read_json(self._documents)) if os.path.lexists(self._documents) else None

    def remove_summary(self) -> None:
        """Removes summary.json: the run has not ended, as it goes on."""
        with disk_errors(self._summary):
            self._summary.unlink(missing_ok=True)

    def write_report(self, html: str) -> Path:
        """Writes report.html; returns its path."""
        replace_file(self._report, html)
        return self._report

    def report(self) -> Path | None:
        """Returns the path of report.html; None where it is missing, or older than the run's summary."""
        try:
            return self._report if self._report.stat().st_mtime_ns >= self._summary.stat().st_mtime_ns else None
        except OSError:  # one of them is not there
            return None

    def lock(self) -> RunLock:
        """Returns a lock; while it is entered, no other process may write this run."""
        return RunLock(self.path)


def nearest_run(path: Path) -> str:
    """Returns the remedy in words where a path leads to no run: names the most similar run beside it or in runs/."""
    try:
        found = {file.parent.name: file.parent for parent in (Path("runs"), path.parent) for file in parent.glob("*/config.yaml")}
    except OSError:
        found = {}
    near = nearest(path.name, found)
    return f"Did you mean {found[near]}?" if near is not None else "Give a folder that lm train or lm import wrote."


class Metrics:
    """metrics.jsonl: one JSON object, with its step, on each line. A number that is not finite is written as null: JSON has no NaN."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._expected = False

    def append(self, record: Tree) -> None:
        """Appends a line. The file is opened anew for each, so that one deleted mid run starts again, with one warning."""
        if self._expected and not self.path.exists():
            log.warning("%s: the file was deleted while the run writes it; a new one starts here.", self.path)
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8", errors="backslashreplace", opener=never_waiting) as file:
                file.write(_line(record))
        self._expected = True

    def truncate(self, step: int, rollbacks: int | None = None) -> None:
        """Drops the records after `step`, and a torn last line: what a resumed run is about to write again.

        rollbacks: how many the run has made up to there; what was written from a later one on is dropped too. None: any number. One to a
        step before was made before, and only told twice, as lm once did.
        """
        replace_file(self.path, self._kept(step, rollbacks) if os.path.lexists(self.path) else ())
        self._expected = True

    def _kept(self, step: int, rollbacks: int | None) -> Iterator[bytes]:
        found = 0
        for line, record in self._records():
            found += (back := record.get("event") == "rolled back")
            if rollbacks is not None and back and found > rollbacks and record["step"] >= step:
                return
            if record["step"] <= step:
                yield line.rstrip() + b"\n"

    def read(self) -> list[Tree]:
        """Returns the records, none where there is no file. The last line may be torn by a kill; any other broken one is refused."""
        return list(self.each())

    def each(self) -> Iterator[Tree]:
        """Yields the same one by one: a million of them take 600 MB."""
        return (record for _, record in self._records()) if os.path.lexists(self.path) else iter(())

    def newest(self, having: str = "") -> list[Tree]:
        """Returns the records of the file's last MiB; lines that are torn or broken are left out, and those without the text `having`."""
        found = []
        for line in read_end(self.path, 1, b"\n").splitlines() if os.path.lexists(self.path) else []:
            if having not in line:
                continue
            with contextlib.suppress(ValueError):
                found.append(_record(line.encode()))
        return found

    def _records(self) -> Iterator[tuple[bytes, Tree]]:
        """Yields each line with what it says."""
        for number, line in enumerate(read_lines(self.path, most_mib=4096), 1):
            try:
                if line.strip():
                    yield line, _record(line)
            except ValueError as error:
                if line.endswith(b"\n"):
                    raise CheckpointError(f"{self.path}:{number}: {error}. Remove the line.") from None


class Samples:
    """samples.md: what the model writes at each validation."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, text: str) -> int:
        """Appends samples; returns the file's length afterwards, which the checkpoint keeps."""
        with disk_errors(self.path):
            with open(self.path, "a", encoding="utf-8", errors="backslashreplace", opener=never_waiting) as file:
                file.write(text)
            return self.path.stat().st_size

    def truncate(self, size: int) -> None:
        """Drops what was written after the checkpoint; a resumed run draws those samples again."""
        if os.path.lexists(self.path) and not self.path.is_file():
            raise CheckpointError(f"{self.path}: this is no regular file, and samples are written into one. Remove it.")
        with disk_errors(self.path):
            if self.path.exists() and self.path.stat().st_size > size:
                os.truncate(self.path, size)

    def read(self) -> str:
        """Returns the text, '' where there is none; of a long one, which a run of weeks writes, the newest samples."""
        return read_end(self.path, _NEWEST_MIB, b"\n## step ") if os.path.lexists(self.path) else ""

    def beginning(self) -> str:
        """Returns the first words of the first sample, up to bytes that are no text; '' where there are none."""
        first = re.search(r"^`+\n\s*([^\x00-\x1f\x7f\ufffd]+)", self.read(), re.MULTILINE)
        return " ".join(first[1].split()[:2])[:40] if first else ""


def _record(line: bytes) -> Tree:
    record = parse_json(line)
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError("not a JSON object with a step")
    return {intern(key): value for key, value in record.items()}  # else the names in a million lines take as much memory as the numbers


def _line(record: Tree) -> str:
    return json.dumps(without_nan(record), allow_nan=False, ensure_ascii=False) + "\n"


def without_nan(value: Any) -> Any:
    """Returns the value with infinities and NaN as None, since JSON has neither."""
    if isinstance(value, dict):
        return {key: without_nan(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
