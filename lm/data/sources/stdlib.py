"""Corpora that are present on every machine: the source files of the running Python's standard library, about 11 MB."""

import io
import os
import sysconfig
import tokenize
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from lm.data.config import SourceConfig
from lm.data.sources.base import Document, Source, Split, document, hashed_frac, share
from lm.data.sources.fingerprint import Files
from lm.schema import Tree

_LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}


class StdlibFileSource(Source):
    """The library's files, each in a split by a hash of its path below the library's folder. A subclass turns a file into documents."""

    def __init__(self, val_frac: float, identity: Tree, cache: Path) -> None:
        self._root, self._val_frac = Path(sysconfig.get_paths()["stdlib"]), val_frac
        self._library = Files(list(_python_files(self._root)), cache, self._root)
        super().__init__(identity, self._library)

    def documents(self) -> Iterator[Document]:
        """Leaves out and counts files that cannot be decoded: some distributions have such files, and a user cannot fix them."""
        self._begin()
        for path in self._library.paths:
            split: Split = "val" if hashed_frac(self._library.name(path).encode()) < self._val_frac else "train"
            with self._library.open(path) as raw:
                data = raw.read()
            try:
                coding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
                text = io.TextIOWrapper(io.BytesIO(data), coding).read()
            except (UnicodeDecodeError, SyntaxError):
                self.skipped += 1
            else:
                yield from self._of_file(text, str(path), split)
            self._position += len(data)

    @abstractmethod
    def _of_file(self, text: str, where: str, split: Split) -> Iterator[Document]:
        """Yields the documents of a file, in their order in it."""

    def select(self, part: int, parts: int) -> None:
        self._library.paths = share(self._library.paths, part, parts, "file")

    def looked_at(self) -> str:
        return str(self._root)


class StdlibConfig(SourceConfig):
    """The source files of the running Python's own standard library, split by a hash of the path."""

    kind: Literal["stdlib"] = "stdlib"
    val_frac: float = Field(0.05, gt=0, lt=1)
    """Part of the files held out for validation."""

    def open(self, cache: Path) -> Source:
        return StdlibSource(self, cache)


class StdlibSource(StdlibFileSource):
    """One document per file."""

    def __init__(self, cfg: StdlibConfig, cache: Path) -> None:
        super().__init__(cfg.val_frac, cfg.identity(), cache)

    def _of_file(self, text: str, where: str, split: Split) -> Iterator[Document]:
        found = document([text], split)
        return iter([found] if found else [])


def _python_files(root: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if name not in _LEFT_OUT and not name.startswith("config-"))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))
