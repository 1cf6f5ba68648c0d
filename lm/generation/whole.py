"""Texts that a model reads whole, batch by batch: those that it tells apart, and those that become vectors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from lm.data.records.fields import BadRecord, value_of
from lm.data.records.fields import names as fields_of
from lm.data.rows.reading import Read
from lm.data.sources.table import rows
from lm.errors import ConfigError
from lm.generation.lines import add_line, digest, gone_on_with, read_file, read_lines
from lm.schema import Tree

_ROWS, _TOKENS = 32, 1 << 14  # of a batch at the most, so that long texts need no more memory than short ones
T = TypeVar("T")  # what is found of each text


class Whole(ABC, Generic[T]):
    """Texts as `Reading` has read them, the longest first: those of like lengths side by side have little padding."""

    def __init__(self, read: Sequence[Read], most: int | None = None) -> None:
        """most: tokens of a batch, unless one text has more. None: as many as are fast. Raises ConfigError for a text of no tokens."""
        self._read, self._lengths, self.n = read, [len(each.ids) for each in read], len(read)
        self._most, self.n_cut = most or _TOKENS, sum(each.cut for each in read)
        if empty := [number for number, length in enumerate(self._lengths, 1) if not length]:
            raise ConfigError(f"texts: number {empty[0]:,} of {len(read):,} has no tokens, and a model reads at least one. Leave it out.")
        self._order = sorted(range(len(read)), key=lambda i: -self._lengths[i])

    @abstractmethod
    def found(self, texts: list[Read]) -> list[T]:
        """Returns what the model makes of each text of a batch."""

    @abstractmethod
    def added(self, found: T) -> Tree:
        """Returns the fields that are added to the line of a text."""

    def batches(self, done: int = 0) -> Iterator[list[tuple[int, T]]]:
        """Yields the numbers of texts and what is found of them, batch by batch.  done: so many of the first are left out, without any mark
        on the others."""
        end = 0
        while end < len(self._order):
            start, longest = end, self._lengths[self._order[end]]
            rows = min(_ROWS, self._most >> (longest - 1).bit_length())  # few numbers: each is compiled
            end = min(len(self._order), start + max(1, rows))
            if end > done:
                some = self._order[start:end]
                yield [*zip(some, self.found([self._read[i] for i in some]), strict=True)][max(0, done - start) :]

    def all(self) -> list[T]:
        """Returns what is found of each text, in their order."""
        found = dict(pair for batch in self.batches() for pair in batch)
        return [found[i] for i in range(self.n)]

    def into(self, out: Path, lines: Sequence[Tree], asked: Tree, told: Callable[[int], None], anew: bool = False) -> int:
        """Writes a file with each line and the fields `added` to it, and returns of how many this was done here; a start that was ended is
        gone on with, as by `answer_all`, whose arguments have these names.  told: called with how many are done so far."""
        with gone_on_with(out, asked | {"texts": digest(lines)}, anew) as (file, done):
            so_far = len(done)
            for each in self.batches(len(done)):
                for i, found in each:
                    add_line(file, i, lines[i] | self.added(found))
                so_far += len(each)
                told(so_far)
        return len(lines) - len(done)


@contextmanager
def of_text(which: str) -> Iterator[None]:
    """Within the block, which reads a text, one that is not Unicode is a ConfigError.  which: its number."""
    try:
        yield
    except UnicodeEncodeError as error:
        fault = f"character {error.start} ({error.object[error.start]!r}) is not valid Unicode"
        raise ConfigError(f"texts: {which}: {fault}. Give it as UTF-8.") from None


def numbered(number: int, n: int) -> str:
    """Returns which of n texts the one of this number, from 1, is."""
    return f"number {number:,} of {n:,}"


def read_texts_file(path: Path) -> list[tuple[Any, str]]:
    """Returns what each line of a file of texts holds, and its place for errors, as `read_lines`; in one that ends in .txt a line is a text
    as it is, and one that ends in .csv or .tsv has a row for each text."""
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv"):
        text = _decoded(read_file(path, "texts"), str(path))
        return [(row, f"{path}, row {i}") for i, row in enumerate(rows(iter([text]), str(path), tabs=kind == ".tsv"), 1)]
    return read_lines(path, "texts", _plain) if kind == ".txt" else read_lines(path, "texts")


def _plain(data: bytes, where: str) -> Tree:
    return {"text": _decoded(data, where).rstrip("\r")}


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: it is not UTF-8 ({error}). Save it as UTF-8.") from None


def values_of(line: object, names: Sequence[str], where: str) -> list[object]:
    """Returns the values of these fields of a line; none where one is missing, or the line is no object."""
    if isinstance(line, dict):
        with suppress(BadRecord):
            return [value_of(line, name, "field", where) for name in names]
    return []


def require_texts(values: Sequence[object], names: Sequence[str], where: str, line: object) -> tuple[str, ...]:
    """Returns what `values_of` has returned of a line. Raises ConfigError unless they are texts."""
    if not values or not all(isinstance(value, str) for value in values):
        there = f", which has {fields_of(line)}" if isinstance(line, dict) else ""
        raise ConfigError(f"{where}: it is no object with a text in {' and '.join(names)}{there}. Fix the line, or set field.")
    return tuple(map(str, values))
