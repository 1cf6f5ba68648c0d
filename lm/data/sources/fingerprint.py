"""Local files identified by their SHA-256: a file whose content differs when it is read is refused, so that no cache holds it."""

import hashlib
import io
import json
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lm.errors import ConfigError, ResourceError
from lm.storage.atomic import replace_file
from lm.storage.manifest import sha256_of

_Stat = tuple[str, int, int, int, int]


def short_hash(value: Any) -> str:
    """Returns the first 16 hexadecimal digits of the SHA-256 of a plain JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the differences between two lists of files, as 'notes.txt has changed', '... is new', '... is gone'; what lies elsewhere by
    now with the same content is none.  before, now: SHA-256 by name."""
    gone, new = ({name: sha for name, sha in a.items() if name not in b} for a, b in ((before, now), (now, before)))
    found = [f"{name} has changed" for name in before if name in now and now[name] != before[name]]
    for name, sha in gone.items():
        there = next((other for other in new if new[other] == sha), None)
        there = there or next((other for other in new if Path(other).name == Path(name).name), None)
        if there is None:
            found.append(f"{name} is gone")
        elif new.pop(there) != sha:
            found.append(f"{there} is not what {name} was: it has changed")
    return found + [f"{name} is new" for name in new]


class Files:
    """Local files and their hashes, which the cache keeps for as long as size, modification and inode-change time of all files stay.

    `paths`: the files that a pass reads; a source may shorten the list.
    """

    def __init__(self, paths: Sequence[Path], cache: Path, root: Path | None = None) -> None:
        """root: folder to which names are relative.  Raises ConfigError for a file that cannot be read."""
        self.paths, self._root = list(paths), root
        try:
            self._stats = {path: _stat(path) for path in paths}
            self._hashes = dict(zip(paths, _hashes(list(self._stats.values()), paths, cache), strict=True))
        except OSError as error:
            raise ConfigError(
                f"data.files: {error.filename} cannot be read ({error.strerror}). Make it readable or leave it out."
            ) from None
        self._read: set[Path] = set()  # files read to their end in this pass, with the known hash

    def by_name(self) -> dict[str, str]:
        """Returns each file's SHA-256 by its name."""
        return {self.name(path): sha for path, sha in self._hashes.items()}

    def name(self, path: Path) -> str:
        """Returns a file's path relative to `root`, if given, so that it is the same everywhere. Bytes that are no UTF-8 are escaped."""
        name = str(path) if self._root is None else path.relative_to(self._root).as_posix()
        return name.encode(errors="backslashreplace").decode()

    def size(self, path: Path) -> int:
        """Returns the size of a file in bytes."""
        return self._stats[path][1]

    def total(self) -> int:
        """Returns the number of bytes that a pass reads."""
        return sum(map(self.size, self.paths))

    def open(self, path: Path) -> "HashedFile":
        """Returns the file, to be read once from its beginning; at its end its hash is compared with the known one."""
        return HashedFile(path, self)

    def begin(self) -> None:
        """Begins a new pass."""
        self._read.clear()

    def judge(self, path: Path, sha256: str) -> None:
        """Compares the hash of the content that was read now with the known one. Raises ConfigError where they differ."""
        if sha256 != self._hashes[path]:
            raise _changed(path)
        self._read.add(path)

    def forget(self, path: Path) -> None:
        """Marks a file as to be hashed again at the end of the pass, because other code has read it by itself."""
        self._read.discard(path)

    def untouched(self) -> bool:
        """Returns whether size and modification time of all files are unchanged."""
        return all(map(self._is_untouched, self.paths))

    def confirm(self) -> None:
        """Raises ConfigError where a file's content does not have its known hash. Files not read to the end in this pass are hashed now."""
        for path in self.paths:
            if path not in self._read:
                with _still_readable(path):
                    found = sha256_of(path)
                self.judge(path, found)
                if not self._is_untouched(path):
                    raise _changed(path)

    def _is_untouched(self, path: Path) -> bool:
        with suppress(OSError):
            return _stat(path)[:3] == self._stats[path][:3]
        return False


class HashedFile(io.RawIOBase):
    """A file that is hashed while it is read, from its beginning on."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path, self._files = path, files
        with _still_readable(path):
            self._raw = path.open("rb", buffering=0)
        self._digest = hashlib.sha256()
        self.position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = self._raw.readinto(buffer) or 0
        self.position += n
        self._digest.update(memoryview(buffer)[:n])
        if not n:
            self._files.judge(self._path, self._digest.hexdigest())
        return n

    def close(self) -> None:
        self._raw.close()
        super().close()


def _hashes(stats: list[_Stat], paths: Sequence[Path], cache: Path) -> list[str]:
    memo = cache / "hashes" / f"{short_hash(stats)}.json"
    try:
        known = json.loads(memo.read_bytes())
    except (ValueError, OSError):  # none yet, torn, or another user's own
        known = None
    if isinstance(known, list) and len(known) == len(paths) and all(isinstance(sha, str) for sha in known):
        return known
    found = [sha256_of(path) for path in paths]
    with suppress(OSError, ResourceError):  # a cache that cannot be written: then they are hashed again the next time
        memo.parent.mkdir(exist_ok=True)
        replace_file(memo, json.dumps(found))
    return found


def _stat(path: Path) -> _Stat:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"data.files: {path} is a pipe or a device, and only regular files are read. Give a file or a folder.")
    return str(path.absolute()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


@contextmanager
def _still_readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fault = f"it cannot be read any more ({error.strerror})"
        raise ConfigError(f"{path}: {fault}, so nothing of it is kept. Bring it back, or start again without it.") from None


def _changed(path: Path) -> ConfigError:
    return ConfigError(f"{path}: the file has changed since its preparation began, so nothing of it is kept. Start again when it stays.")
