"""Local files as documents: our own readers of text and JSON lines, plain, gzip or zstd, so that each error has its place."""

import codecs
import csv
import glob
import io
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lm.config import Tree
from lm.data.config import TextConfig
from lm.data.sources.base import Document, Source, Split, document, share
from lm.data.sources.compressed import PACKED, unpacked
from lm.data.sources.hub import read_csv, read_parquet
from lm.data.sources.records import BadRecord, Line, RecordReader, not_utf8
from lm.data.store.cache import file_hashes
from lm.errors import ConfigError

_TEXT = (".txt", ".md", ".rst", ".py")  # one document each
_KINDS = (*_TEXT, ".jsonl", ".csv", ".parquet")
_CHUNK = 1 << 20


class TextSource(Source):
    """The documents of data=text, in the order of the file names; held-out files come first."""

    def __init__(self, cfg: TextConfig, cache: Path) -> None:
        self._cfg = cfg
        self._is_part = False
        self._reader = RecordReader(cfg.field, cfg.record)
        self._train = [LocalFile(path) for path in find_files(cfg.files, "data.files")]
        self._val = [LocalFile(path) for path in find_files(cfg.val_files, "data.val_files")] if cfg.val_files is not None else []
        paths = [file.path for file in (*self._val, *self._train)]
        texts = [file.path for file in (*self._val, *self._train) if file.kind == ".txt"]
        if cfg.record is not None and texts:
            raise ConfigError(
                f"data.files: {texts[0]} is a text, and data.record.kind={cfg.record.kind} needs records with fields."
                " Give jsonl, csv or parquet files."
            )
        identity: Tree = cfg.model_dump(mode="json", include={"kind", "val_frac", "field", "on_bad_record"})
        identity |= {"record": cfg.record.tree()} if cfg.record is not None else {}
        identity["val_files"] = [str(file.path) for file in self._val]
        super().__init__(file_hashes(paths, cache), identity, sum(path.stat().st_size for path in paths))

    def documents(self) -> Iterator[Document]:
        self.skipped = 0
        for file in (*self._val, *self._train):
            file.position = 0
        for file in self._val:
            yield from self._read(file, "val")
        if self._cfg.val_files is None and not self._is_part and [file.kind for file in self._train] == [".txt"]:
            yield from self._divide(self._train[0])
            return
        for file in self._train:
            yield from self._read(file, "train" if self._cfg.val_files is not None else self._cfg.val_frac)

    def select(self, part: int, parts: int) -> None:
        self._train = share(self._train, part, parts, "files")
        self._val = self._val if part == 1 else []
        self._is_part = True
        self.total = sum(file.path.stat().st_size for file in (*self._val, *self._train))

    def position(self) -> int:
        return sum(file.position for file in (*self._val, *self._train))

    def _divide(self, file: "LocalFile") -> Iterator[Document]:
        """A lone text: its beginning trains, its end validates."""
        if self._is_readable(file):
            cut = file.boundary(int(file.text_bytes() * (1 - self._cfg.val_frac)))
            spans: list[tuple[int, int | None, Split]] = [(0, cut, "train"), (cut, None, "val")]
            for start, stop, split in spans:
                if part := document(file.text(start, stop), split):
                    yield part

    def _read(self, file: "LocalFile", split: Split | float) -> Iterator[Document]:
        if file.kind != ".txt":
            yield from self._records(file, split)
        elif self._is_readable(file) and (whole := document(file.text(), split)):
            yield whole

    def _records(self, file: "LocalFile", split: Split | float) -> Iterator[Document]:
        for where, record in file.records():
            try:
                found = self._reader.document(record, where, split)
            except BadRecord:
                if self._cfg.on_bad_record == "error":
                    raise
                self.skipped += 1
            else:
                if found is not None:
                    yield found

    def _is_readable(self, file: "LocalFile") -> bool:
        """With `skip`, whether a text file is UTF-8 to its end: it is one record, and is not begun before that is known."""
        if self._cfg.on_bad_record == "error":
            return True
        try:
            return all(True for _ in file.text())
        except BadRecord:
            self.skipped += 1
            file.position = file.path.stat().st_size
            return False


class LocalFile:
    """One file; `position` is how many of its stored bytes have been read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kind = _kind(path)
        self.position = 0

    def text(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """The text between two byte offsets (of the unpacked file), without a byte-order mark."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        at = start
        for data in self._chunks(start, stop):
            held = len(decoder.getstate()[0])
            try:
                chunk = decoder.decode(data)
            except UnicodeDecodeError as error:
                raise not_utf8(str(self.path), at - held + error.start) from None
            yield chunk.removeprefix("\ufeff") if at == 0 else chunk
            at += len(data)
        if decoder.getstate()[0] and stop is None:
            raise not_utf8(str(self.path), at - len(decoder.getstate()[0]))

    def records(self) -> Iterator[tuple[str, "Line | Mapping[str, Any]"]]:
        """Each line or row with its place; blank lines are passed over."""
        if self.kind != ".jsonl":
            yield from self._rows()
            return
        offset = 0
        with unpacked(self.path) as (raw, stream):
            for number, line in enumerate(stream, 1):
                self.position = raw.tell()
                if line.strip():
                    yield f"{self.path}:{number}", Line(line, offset)
                offset += len(line)

    def text_bytes(self) -> int:
        """Bytes of the unpacked file."""
        if self.path.suffix.lower() not in PACKED:
            return self.path.stat().st_size
        return sum(len(data) for data in self._chunks(0, None))

    def boundary(self, offset: int) -> int:
        """The first place from `offset` on where a character begins."""
        head = next(self._chunks(offset, offset + 4), b"")
        return offset + next((n for n, byte in enumerate(head) if byte & 0xC0 != 0x80), 0)

    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, row in enumerate(read_csv(self.path, self._columns()) if self.kind == ".csv" else read_parquet(self.path), 1):
            yield f"{self.path} row {number}", row
        self.position = self.path.stat().st_size

    def _columns(self) -> list[str]:
        """The header of a csv file, after a pass over all of it, since datasets does not say which byte is not UTF-8."""
        chunks = self.text()
        head = io.StringIO(next(chunks, ""), newline="")
        deque(chunks, maxlen=0)
        return next(csv.reader(head), [])

    def _chunks(self, start: int, stop: int | None) -> Iterator[bytes]:
        with unpacked(self.path) as (raw, stream):
            at = stream.seek(start) if stream.seekable() else 0
            while data := stream.read(_CHUNK if stop is None else min(_CHUNK, stop - at)):
                self.position = raw.tell()
                at += len(data)
                if at > start:
                    yield data[max(0, start - at + len(data)) :]


def find_files(given: str | list[str], key: str) -> list[Path]:
    """Files, folders (what has a known ending below them, without dot-files and linked folders) and globs as files: each once, sorted."""
    found = {path for pattern in ([given] if isinstance(given, str) else given) for path in _matches(pattern, key)}
    if not found:
        raise ConfigError(f"{key}: {given} holds no file to read. Give files ending in {_endings()}.")
    return sorted(found)


def _matches(pattern: str, key: str) -> Iterator[Path]:
    path = Path(pattern).expanduser()
    paths = [path] if os.path.exists(path) else [Path(name) for name in glob.glob(str(path), recursive=True)]
    if not paths:
        raise ConfigError(f"{key}: {pattern} does not exist. Give a file, a folder or a glob that matches something.")
    for each in paths:
        if each.is_dir():
            yield from _below(each)
        elif _is_known(each):
            yield each
        else:
            raise ConfigError(f"{key}: {each} has an ending that is not known. Known endings: {_endings()}.")


def _below(root: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if not name.startswith(".")]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if _is_known(path) and path.is_file())


def _kind(path: Path) -> str:
    """The ending below .gz and .zst; .txt for every kind of text."""
    name = path.with_suffix("") if path.suffix.lower() in PACKED else path
    ending = name.suffix.lower()
    return ".txt" if ending in _TEXT else ending


def _is_known(path: Path) -> bool:
    kind = _kind(path)
    return kind in _KINDS and (kind != ".parquet" or path.suffix.lower() == kind)  # parquet packs its own columns


def _endings() -> str:
    return f"{', '.join(_KINDS)}, and all but .parquet also with {' or '.join(PACKED)}"
