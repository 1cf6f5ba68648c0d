"""metrics.csv, as a logger."""

import csv
import io
import logging
from collections.abc import Iterator, Sequence

from lm.errors import LmError
from lm.schema import Tree
from lm.storage.atomic import disk_errors, replace_file
from lm.storage.run_folder import RunFolder, without_nan

log = logging.getLogger("lm")


class Csv:
    """Appends to metrics.csv. At first, where a figure comes for the first time, and after a rollback, the file is made of metrics.jsonl,
    so that the two agree after a resume too."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._file = run, run.path / "metrics.csv"
        self._columns: list[str] = []  # none: the file is to be made
        self._new: list[Tree] = []  # lines that it lacks
        self._warned = False

    def log(self, record: Tree) -> None:
        if "event" not in record:
            self._new.append(without_nan(record))
        if "val_loss" in record:
            self._write()

    def samples(self, step: int, texts: Sequence[str]) -> None:
        """Does nothing: a csv file has no place for samples."""

    def go_back(self, step: int) -> None:
        self._columns = []

    def close(self, summary: Tree | None) -> None:
        self._write()

    def _write(self) -> None:
        try:
            if self._columns and self._file.exists() and {key for line in self._new for key in line} <= {*self._columns}:
                with disk_errors(self._file), self._file.open("a", encoding="utf-8") as file:
                    csv.DictWriter(file, self._columns, lineterminator="\n").writerows(self._new)
            else:
                self._columns = list(dict.fromkeys(key for line in self._lines() for key in line))
                replace_file(self._file, self._text())
            self._new = []
        except LmError as error:
            self._columns = []  # a part of the lines may be there
            if not self._warned:
                log.warning("metrics.csv is not written: %s The run goes on; metrics.jsonl has everything.", error)
            self._warned = True

    def _lines(self) -> Iterator[Tree]:
        return (line for line in self._run.metrics.each() if "event" not in line)

    def _text(self) -> Iterator[bytes]:
        """Yields the whole file, a line at a time: a million lines of metrics would take 600 MB."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writeheader()
        for line in self._lines():
            writer.writerow(line)
            yield _taken(text)
        yield _taken(text)


def _taken(text: io.StringIO) -> bytes:
    """Returns what has been written, which is then no more there."""
    taken = text.getvalue().encode(errors="backslashreplace")
    text.seek(0)
    text.truncate()
    return taken
