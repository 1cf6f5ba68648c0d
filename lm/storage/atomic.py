"""Folders that exist whole or not at all: written beside their final place, hashed into a manifest, synced, then renamed."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TextIO

from safetensors import SafetensorError

from lm.errors import CheckpointError, ConfigError, ResourceError
from lm.schema import Tree
from lm.storage.reading import read_json

MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"  # prefix of what is unfinished or on its way out
_REPLACED = ".old-"  # prefix of what a folder of the same name is about to replace


def failpoint(point: str) -> None:
    """Die (`kill`) or run out of space (`enospc`) here where LM_FAILPOINT=<point>:<action> says so; tests use it."""
    name, _, action = os.environ.get("LM_FAILPOINT", "").partition(":")
    if name != point:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def free_bytes(path: Path) -> int:
    """Free space where `path` is or would be."""
    return shutil.disk_usage(next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())).free


def require_space(path: Path, needed_bytes: int) -> None:
    """Refuse before writing what would not fit."""
    if needed_bytes > (free := free_bytes(path)):
        raise ResourceError(_no_space(path, needed_bytes, free))


@contextmanager
def disk_errors(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """What the system refuses while `path` is written becomes a ResourceError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        code = _errno(error)
        if code == errno.EFBIG:
            raise ResourceError(
                f"{path}: a file of {needed_bytes:,} bytes is larger than one may be here (ulimit -f, or the file system). Raise the limit,"
                " or choose another folder."
            ) from error
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(_no_space(path, needed_bytes, free_bytes(path))) from error
        reason = os.strerror(code) if code else str(error)
        raise ResourceError(f"{path}: cannot be written ({reason}). Make it writable, or choose another folder.") from error


def _errno(error: OSError | SafetensorError) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))  # safetensors writes from Rust and keeps only the text
    return int(found[1]) if found else None


def _no_space(path: Path, needed: int, free: int) -> str:
    return f"{path}: no space left: {needed:,} bytes are needed and {free:,} are free. Free some, or choose another folder."


def require_new(out: str | Path) -> Path:
    """Returns the path; ConfigError where something is there already."""
    path = Path(out).expanduser()
    if path.exists() or path.is_symlink():
        raise ConfigError(f"out={out}: it exists already, and nothing is overwritten. Choose another folder, or remove it.")
    return path


def temporary_of(path: Path) -> Path:
    """Where `path` is written until it is complete."""
    return path.with_name(TEMPORARY + path.name)


@contextmanager
def atomic_folder(path: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """A temporary folder to write into; it becomes `path`, with a manifest, when the block ends well, and vanishes otherwise.

    A folder already at `path` stays until the new one is complete; `clean` undoes a kill between the two renames.
    """
    temporary = temporary_of(path)
    with disk_errors(path, needed_bytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        require_space(path, needed_bytes)
        remove(temporary)
        temporary.mkdir()
        try:
            failpoint("made")
            yield temporary
            _seal(temporary)
            _publish(temporary, path)
        except BaseException:
            remove(temporary)
            raise


def _seal(folder: Path) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    usual = folder.stat().st_mode & 0o666
    for name in names:
        (folder / name).chmod(usual)  # safetensors lets nobody but the owner read
        _sync(folder / name)
    failpoint("manifest")
    write_json(folder / MANIFEST, {name: _sha256(folder / name) for name in names})
    _sync(folder / MANIFEST)
    _sync(folder)


def _publish(temporary: Path, path: Path) -> None:
    failpoint("rename")
    replaced = path.with_name(_REPLACED + path.name)
    if path.exists():
        remove(replaced)
        path.rename(replaced)
        failpoint("replaced")
    temporary.rename(path)
    _sync(path.parent)
    failpoint("renamed")
    remove(replaced)


def discard(path: Path) -> None:
    """Remove a folder so that a kill midway leaves no damaged one under its name."""
    doomed = temporary_of(path)
    remove(doomed)
    path.rename(doomed)
    failpoint("prune")
    remove(doomed)


def clean(folder: Path) -> None:
    """After a kill: what was unfinished or half removed goes; what was about to be replaced comes back."""
    for stray in folder.glob(TEMPORARY + "*"):
        remove(stray)
    for replaced in folder.glob(_REPLACED + "*"):
        path = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if path.exists():
            remove(replaced)
        else:
            replaced.rename(path)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def verify(folder: Path) -> None:
    """Every file is what the manifest says; CheckpointError names the first that is not."""
    remedy = "Use another checkpoint, or restore this one from a copy."
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder. Check the path.")
    for name, digest in read_json(folder / MANIFEST).items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: the file is missing, but {MANIFEST} lists it. {remedy}")
        if _sha256(folder / name) != digest:
            raise CheckpointError(f"{folder / name}: the file is damaged: its SHA-256 is not the one in {MANIFEST}. {remedy}")


def write_json(path: Path, tree: Tree) -> None:
    """Without a newline at the end: a file that lost its last byte must not parse."""
    path.write_text(json.dumps(tree, indent=1, allow_nan=False, ensure_ascii=False), encoding="utf-8", errors="backslashreplace")


def replace_file(path: Path, text: str) -> None:
    """Whoever reads it, and whenever the writer is killed, the file is the old one or the new one."""
    temporary = temporary_of(path)
    with disk_errors(path):
        try:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # of a file name that is not UTF-8, say
            temporary.replace(path)
        finally:
            remove(temporary)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RunLock:
    """One process per run folder, by flock on `run.lock`. The kernel drops it with its holder, so a stale file blocks nobody."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "run.lock"
        self._file: TextIO | None = None
        os.register_at_fork(after_in_child=self._close)  # else a loader worker that outlives us would keep the lock

    def __enter__(self) -> Self:
        with disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+", encoding="utf-8", errors="replace")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._refuse(self._file)
            self._file.truncate(0)
            self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
            self._file.flush()
        return self

    def _refuse(self, file: TextIO) -> None:
        file.seek(0)
        found = re.fullmatch(r'\{"pid": (\d+), "host": "([\w.-]+)"\}', file.read(1 << 10))
        self._close()
        who = f"pid {found[1]} on host {found[2]}" if found else "a process that is just starting"
        raise ResourceError(f"{self._path.parent}: the run is in use by {who}, and only one process may write it. Stop that one or wait.")

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
