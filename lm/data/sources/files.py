"""Local files as documents. Text and JSON lines, plain, gzip or zstd, have readers of their own here, so that errors name their place."""

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

from pydantic import Field

from lm.data.records.base import Values
from lm.data.records.fields import BadRecord, Line, not_utf8, table_not_utf8
from lm.data.sources.array import elements
from lm.data.sources.base import Document, Source, Split, document, share
from lm.data.sources.compressed import PACKED, unpacked
from lm.data.sources.fingerprint import Files
from lm.data.sources.found import find_files, kind_of, left_out
from lm.data.sources.hub import read_parquet
from lm.data.sources.recorded import RecordedConfig, RecordedSource
from lm.data.sources.table import rows
from lm.errors import ConfigError
from lm.schema import Tree
from lm.units import counted

_CHUNK = 1 << 20


class TextConfig(RecordedConfig):
    """Local files: .txt, .md, .rst, .py, .jsonl, .json, .csv, .tsv, .parquet, plain or .gz or .zst; a folder means every such
    file below it, but no .json."""

    kind: Literal["text"] = "text"
    files: str | list[str] = Field(min_length=1)
    """Files, folders or globs."""
    val_files: str | list[str] | None = Field(None, min_length=1)
    """Held-out files. null: the last val_frac of a single text file, or a hash split of the documents."""
    val_frac: float = Field(0.1, gt=0, lt=1)
    """Part held out where val_files is null."""

    def open(self, cache: Path) -> Source:
        return TextSource(self, cache)


class TextSource(RecordedSource):
    """The documents of data=text, in the order of the file names; held-out files come first."""

    def __init__(self, cfg: TextConfig, cache: Path) -> None:
        train = find_files(cfg.files, "data.files")
        val = find_files(cfg.val_files, "data.val_files") if cfg.val_files is not None else []
        remarks = left_out(cfg.files, "data.files", [*val, *train])
        if cfg.val_files is not None:
            remarks += left_out(cfg.val_files, "data.val_files", val)
            train, told = _apart(train, val)
            remarks += told
        self._cfg, self._stored = cfg, Files([*val, *train], cache)
        split: Split | float = cfg.val_frac if cfg.val_files is None else "train"
        self._files = [LocalFile(path, self._stored, "val") for path in val] + [LocalFile(path, self._stored, split) for path in train]
        kinds = [file.kind for file in self._files if self._stored.size(file.path)]
        self._cut_at = 1 - cfg.val_frac if cfg.val_files is None and kinds == [".txt"] else None
        self._test_at = 1.0
        texts = [file.path for file in self._files if file.kind == ".txt"]
        if cfg.record is not None and texts:
            raise ConfigError(
                f"data.files: {texts[0]} is a text, and data.record.kind={cfg.record.kind} needs records with fields."
                " Give jsonl, json, csv, tsv or parquet files."
            )
        identity: Tree = {**cfg.identity(), "files": None, "val_files": list(map(str, val))}
        super().__init__(cfg, identity, self._stored, by_hash=cfg.val_files is None and self._cut_at is None)
        self.remarks = remarks

    def _pass(self) -> Iterator[Document]:
        self._begin()
        for file in self._files:
            file.position = 0
        for file in self._files:
            if file.kind != ".txt":
                yield from self._documents_of(file.records(self._column), file.split)
            elif self._is_readable(file):
                yield from self._texts(file)

    def divided(self, test_frac: float) -> Iterator[Document]:
        if self._cut_at is None:
            return super().divided(test_frac)
        self._test_at = 1 - (1 - self._cut_at) * test_frac
        return self.documents()

    def held_out(self) -> str | None:
        if self._cfg.val_files is not None:
            return None
        part = f"data.val_frac={self._cfg.val_frac:g} of"
        by_hash = f"{part} all on average, as a hash of each decides, and at least one"
        return f"{part} the text, its end" if self._cut_at is not None else by_hash

    def select(self, part: int, parts: int) -> None:
        super().select(part, parts)
        val, train = ([file for file in self._files if (file.split == "val") == held_out] for held_out in (True, False))
        self._files = (val if part == 1 else []) + share(train, part, parts, "file")
        self._stored.paths = [file.path for file in self._files]

    def position(self) -> int:
        return sum(file.position for file in self._files)

    def _texts(self, file: "LocalFile") -> Iterator[Document]:
        """Yields a text file as a document. A file that is the only one is cut: its beginning trains, its end validates and tests."""
        parts: Iterator[tuple[Split | float, int, bytes]]
        if self._cut_at is None:
            parts = ((file.split, at, data) for at, data in file.content())
        else:
            size = file.text_bytes()
            parts = _cut(file.content(), [("train", int(size * self._cut_at)), ("val", int(size * self._test_at)), ("test", size)])
        for split, part in groupby(parts, key=lambda chunk: chunk[0]):
            if found := document(file.text((at, data) for _, at, data in part), split):
                yield found

    def _is_readable(self, file: "LocalFile") -> bool:
        """Whether a text file may be read. With on_bad_record=skip the file is first read to its end to check that it is UTF-8, since the
        whole file is one record to skip."""
        if not self._skips:
            return True
        try:
            return all(True for _ in file.text(file.content()))
        except BadRecord as error:
            self._skip(error)
            file.position = self._stored.size(file.path)
            return False


def _apart(train: list[Path], val: list[Path]) -> tuple[list[Path], list[str]]:
    """Returns the training files without held-out ones, and what to say of those; all files if no other is left."""
    held_out = {path.resolve() for path in val}
    kept = [path for path in train if path.resolve() not in held_out]
    if not kept or len(kept) == len(train):
        return train, []
    return kept, [f"data.files: {counted(len(train) - len(kept), 'file')} left out of training, as data.val_files holds out the same."]


def _cut(chunks: Iterator[tuple[int, bytes]], ends: Sequence[tuple[Split, int]]) -> Iterator[tuple[Split | float, int, bytes]]:
    """Yields (split, offset, bytes) of a text.  ends: each split ends before the first character that begins at its byte or later."""
    (split, at), *later = ends
    for offset, data in chunks:
        while later:
            from_here = range(max(0, at - offset), len(data))
            cut = next((n for n in from_here if data[n] & 0xC0 != 0x80), len(data))
            if cut:
                yield split, offset, data[:cut]
            if cut == len(data):
                break
            offset, data = offset + cut, data[cut:]
            (split, at), *later = later
        else:
            yield split, offset, data


class LocalFile:
    """One file; `position` counts the stored bytes read so far."""

    def __init__(self, path: Path, hashed: Files, split: Split | float) -> None:
        """split: of the file's documents, or the part of them that a hash puts into validation."""
        self.path, self._hashed, self.split = path, hashed, split
        self.kind = kind_of(path)
        self.position = 0

    def content(self) -> Iterator[tuple[int, bytes]]:
        """Yields the unpacked bytes in chunks, each with its offset."""
        at, raw = 0, self._hashed.open(self.path)
        with unpacked(self.path, raw) as stream:
            while data := stream.read(_CHUNK):
                self.position = raw.position
                yield at, data
                at += len(data)

    def text(self, chunks: Iterator[tuple[int, bytes]], broken: Callable[[str, int], ConfigError] = not_utf8) -> Iterator[str]:
        """Yields the text of chunks of the file's bytes, without a byte-order mark. Raises `broken`, BadRecord, for bytes that are not
        UTF-8."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        end = 0
        for at, data in chunks:
            held, end = len(decoder.getstate()[0]), at + len(data)
            try:
                chunk = decoder.decode(data)
            except UnicodeDecodeError as error:
                raise broken(str(self.path), at - held + error.start) from None
            yield chunk.removeprefix("\ufeff") if at == 0 else chunk
        if held := len(decoder.getstate()[0]):
            raise broken(str(self.path), end - held)

    def records(self, column: str | None) -> Iterator[tuple[str, Line | Values]]:
        """Yields each line or row with its place; blank lines are skipped.  column: all that is needed of a table; None: all columns."""
        if self.kind == ".json":
            for number, value in enumerate(elements(self.text(self.content(), table_not_utf8), str(self.path)), 1):
                yield f"{self.path} record {number}", value if isinstance(value, dict) else Line(json.dumps(value).encode(), 1)
            return
        if self.kind in (".csv", ".tsv"):
            found = rows(self.text(self.content(), table_not_utf8), str(self.path), tabs=self.kind == ".tsv")
            yield from ((f"{self.path} row {number}", row) for number, row in enumerate(found, 1))
            return
        if self.kind == ".parquet":
            yield from self._rows(column)
            return
        offset, raw = 0, self._hashed.open(self.path)
        with unpacked(self.path, raw) as stream:
            for number, line in enumerate(stream, 1):
                self.position = raw.position
                if line.strip():
                    yield f"{self.path}:{number}", Line(line, offset)
                offset += len(line)

    def text_bytes(self) -> int:
        """Returns the size of the unpacked file in bytes."""
        if self.path.suffix.lower() not in PACKED:
            return self._hashed.size(self.path)
        return sum(len(data) for _, data in self.content())

    def _rows(self, column: str | None) -> Iterator[tuple[str, Values]]:
        """Yields the rows of a parquet file. `datasets` opens the file itself, so it is hashed again at the end of the pass."""
        for number, row in enumerate(read_parquet(self.path, column), 1):
            yield f"{self.path} row {number}", row
        self._hashed.forget(self.path)
        self.position = self._hashed.size(self.path)
