"""How well zlib compresses validation text. A part of a source keeps that text, so that joined parts have the figure of the whole."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from lm.data.store.faults import damaged
from lm.data.store.shared import brought
from lm.schema import Tree
from lm.storage.manifest import sha256_of

_MOST = 1 << 26
_FILE = "val.texts.jsonl"


class Squeezed:
    """Compresses passages of validation text, up to the one that ends beyond 64 MB.  kept: folder to write them into, if any."""

    def __init__(self, kept: Path | None = None) -> None:
        self._zlib = zlib.compressobj(9)
        self._in = self._out = 0
        self._file = None if kept is None else (kept / _FILE).open("wb")

    def add(self, text: str) -> None:
        """Compresses a passage."""
        if self._in < _MOST:
            data = text.encode()
            self._in += len(data)
            self._out += len(self._zlib.compress(data))
            if self._file is not None:
                self._file.write(json.dumps(text, ensure_ascii=False).encode() + b"\n")

    def close(self) -> Tree:
        """Returns the number of bytes before and after, and the checksum of the file that was written, for index.json."""
        found: Tree = {"zlib": [self._in, self._out + len(self._zlib.flush())]}
        if self._file is not None:
            self._file.close()
            found["val_texts"] = sha256_of(Path(self._file.name))
        return found


def kept(folder: Path, index: Tree) -> Iterator[str]:
    """Yields the passages that a part keeps. Raises ConfigError where they are not those of its index."""
    file = brought(folder / _FILE, lambda copy: sha256_of(copy) == index["val_texts"])
    if not file.is_file() or sha256_of(file) != index["val_texts"]:
        raise damaged(file, "has another checksum than the index says" if file.is_file() else "is missing")
    with file.open("rb") as stream:
        yield from map(json.loads, stream)
