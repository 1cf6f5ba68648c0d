"""Corpora that are present on every machine: the source files of the running Python's own standard library, about 11 MB."""

import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from lm.config import Tree
from lm.data.cache import file_hashes
from lm.data.config import StdlibConfig
from lm.data.source import Document, Source, document, hashed_frac

_LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}


class StdlibSource(Source):
    """One document per file, split by a hash of its path below the library's folder."""

    def __init__(self, cfg: StdlibConfig, cache: Path) -> None:
        self._root = Path(sysconfig.get_paths()["stdlib"])
        self._paths = list(_python_files(self._root))
        hashes = file_hashes(self._paths, cache)
        names = {self._name(path): hashes[str(path)] for path in self._paths}
        identity: Tree = {"kind": cfg.kind, "val_frac": cfg.val_frac}
        super().__init__(names, identity, sum(path.stat().st_size for path in self._paths))
        self._val_frac = cfg.val_frac
        self._position = 0

    def documents(self) -> Iterator[Document]:
        self._position = self.skipped = 0
        for path in self._paths:
            in_val = hashed_frac(self._name(path).encode()) < self._val_frac
            try:
                with tokenize.open(path) as stream:  # heeds a coding line
                    found = document([stream.read()], "val" if in_val else "train")
            except (UnicodeDecodeError, SyntaxError):  # a distribution's own odd file; nobody can be asked to mend it
                found, self.skipped = None, self.skipped + 1
            if found:
                yield found
            self._position += path.stat().st_size

    def position(self) -> int:
        return self._position

    def looked_at(self) -> str:
        return str(self._root)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


def _python_files(root: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if name not in _LEFT_OUT and not name.startswith("config-"))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))
