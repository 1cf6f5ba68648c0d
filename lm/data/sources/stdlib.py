"""Corpora that are present on every machine: the source files of the running Python's own standard library, about 11 MB."""

import os
import sysconfig
import tokenize
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path

from lm.config import Tree
from lm.data.config import StdlibConfig
from lm.data.sources.base import Document, Source, Split, document, hashed_frac, share
from lm.data.store.cache import file_hashes

_LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}


class StdlibFiles:
    """The files, each in a split by a hash of its path below the library's folder.  hashes: SHA-256 by that path."""

    def __init__(self, val_frac: float, cache: Path) -> None:
        self.root = Path(sysconfig.get_paths()["stdlib"])
        self._val_frac = val_frac
        self._paths = list(_python_files(self.root))
        hashes = file_hashes(self._paths, cache)
        self.hashes = {self._name(path): hashes[str(path)] for path in self._paths}
        self.total = sum(path.stat().st_size for path in self._paths)

    def select(self, part: int, parts: int) -> None:
        """Read only these from now on."""
        self._paths = share(self._paths, part, parts, "files")
        self.total = sum(path.stat().st_size for path in self._paths)

    def read(self) -> Iterator[tuple[Path, Split, str | None]]:
        """Path, split and text; None for a distribution's own odd file, which nobody can be asked to mend."""
        for path in self._paths:
            split: Split = "val" if hashed_frac(self._name(path).encode()) < self._val_frac else "train"
            try:
                with tokenize.open(path) as stream:  # heeds a coding line
                    yield path, split, stream.read()
            except (UnicodeDecodeError, SyntaxError):
                yield path, split, None

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


class StdlibFileSource(Source):
    """What the files hold; how a file becomes documents is the subclass's."""

    def __init__(self, val_frac: float, identity: Tree, cache: Path) -> None:
        self._files = StdlibFiles(val_frac, cache)
        super().__init__(self._files.hashes, identity, self._files.total)
        self._position = 0

    def documents(self) -> Iterator[Document]:
        self._position = self.skipped = 0
        for path, split, text in self._files.read():
            if text is None:
                self.skipped += 1
            else:
                yield from self._of_file(text, str(path), split)
            self._position += path.stat().st_size

    @abstractmethod
    def _of_file(self, text: str, where: str, split: Split) -> Iterator[Document]:
        """In their order in the file."""

    def select(self, part: int, parts: int) -> None:
        self._files.select(part, parts)
        self.total = self._files.total

    def position(self) -> int:
        return self._position

    def looked_at(self) -> str:
        return str(self._files.root)


class StdlibSource(StdlibFileSource):
    """One document per file."""

    def __init__(self, cfg: StdlibConfig, cache: Path) -> None:
        super().__init__(cfg.val_frac, {"kind": cfg.kind, "val_frac": cfg.val_frac}, cache)

    def _of_file(self, text: str, where: str, split: Split) -> Iterator[Document]:
        found = document([text], split)
        return iter([found] if found else [])


def _python_files(root: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if name not in _LEFT_OUT and not name.startswith("config-"))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))
