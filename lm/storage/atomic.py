"""Folders that exist whole or not at all: written beside their final place, hashed into a manifest, synced, then renamed."""

import ctypes
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from lm.errors import ResourceError
from lm.schema import Tree
from lm.storage.manifest import MANIFEST, hashes

TEMPORARY = ".tmp-"  # prefix of what is unfinished or on its way out
_REPLACED = ".old-"  # prefix of what a folder of the same name is about to replace, where two names cannot be swapped
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux
log = logging.getLogger("lm")


def failpoint(point: str) -> None:
    """Kills the process (`kill`) or raises as a full disk does (`enospc`) where LM_FAILPOINT=<point>:<action> says so; tests use it."""
    name, _, action = os.environ.get("LM_FAILPOINT", "").partition(":")
    if name == point and action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == point:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def free_bytes(path: Path) -> int:
    """Returns the free space, in bytes, where `path` is or would be."""
    return shutil.disk_usage(next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())).free


def require_space(path: Path, needed_bytes: int) -> None:
    """Raises ResourceError, before anything is written, where so many bytes do not fit."""
    if needed_bytes > (free := free_bytes(path)):
        raise ResourceError(_no_space(path, needed_bytes, free))


@contextmanager
def disk_errors(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Within the block, which writes `path`, errors of the system become ResourceError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if (code := _errno(error)) == errno.EFBIG:
            size = f" of {needed_bytes:,} bytes" if needed_bytes else ""
            rule = "is larger than one may be here (ulimit -f, or the file system)"
            raise ResourceError(f"{path}: a file{size} {rule}. Raise the limit, or choose another folder.") from error
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(_no_space(path, needed_bytes, free_bytes(path))) from error
        reason = os.strerror(code) if code else str(error)
        raise ResourceError(f"{path}: cannot be written ({reason}). Make it writable, or choose another folder.") from error


def _errno(error: OSError | SafetensorError) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"(?:os error|code:) (\d+)", str(error))  # safetensors writes from Rust and keeps the text; before 0.6, Rust's own
    return int(found[1]) if found else None


def _no_space(path: Path, needed: int, free: int) -> str:
    room = f"{needed:,} bytes are needed and {free:,} are free" if needed else f"{free:,} bytes are free"
    return f"{path}: no space left: {room}. Free some, or choose another folder."


def _unique(path: Path) -> Path:
    """Returns a name beside `path` that nothing has."""
    return path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}")


def _prefix(path: Path) -> str:
    return f"{TEMPORARY}{path.name[:40]}-"  # with what follows it is short enough for any file system


@contextmanager
def beside(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """Yields a temporary file or folder beside `path`, made by `make` for this writer alone; removed behind the block, unless renamed
    there.

    The writer holds a lock on it: temporary files of `path` without a lock were left by killed writers, and are removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(path)
    temporary, descriptor = _claimed(path, make)
    try:
        yield temporary
    finally:
        remove(temporary)
        os.close(descriptor)


def _claimed(path: Path, make: Callable[[Path], None]) -> tuple[Path, int]:
    while True:
        temporary = _unique(path)
        make(temporary)
        with suppress(FileNotFoundError):  # another writer took it for one that was left
            descriptor = os.open(temporary, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.lexists(temporary):
                return temporary, descriptor
            os.close(descriptor)


def _remove_left(path: Path) -> None:
    for name in os.listdir(path.parent):
        if name.startswith(_prefix(path)):
            with suppress(OSError):  # its writer is at work, or done by now
                descriptor = os.open(path.parent / name, os.O_RDONLY | os.O_NONBLOCK)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(path.parent / name)
                finally:
                    os.close(descriptor)


@contextmanager
def atomic_folder(path: Path, needed_bytes: int = 0, replace: bool = True) -> Iterator[Path]:
    """Yields a temporary folder to write into; it becomes `path`, with a manifest, when the block ends well, and vanishes otherwise.

    A folder at `path` stays until the new one is complete. replace=False: raises ResourceError where there is one by then.
    """
    with disk_errors(path, needed_bytes):
        require_space(path, needed_bytes)
        with beside(path, Path.mkdir) as temporary:
            failpoint("made")
            yield temporary
            _seal(temporary)
            _publish(temporary, path, replace)


def _seal(folder: Path) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    usual = folder.stat().st_mode & 0o666
    for name in names:
        (folder / name).chmod(usual)  # safetensors lets nobody but the owner read
    with hashes(folder, names) as found:  # while the disk is waited for
        for name in names:
            sync(folder / name)
        listed = dict(zip(names, found, strict=True))
    failpoint("manifest")
    write_json(folder / MANIFEST, listed)
    for written in (folder / MANIFEST, *{(folder / name).parent for name in names} | {folder}):
        sync(written)


def _publish(temporary: Path, path: Path, replace: bool) -> None:
    """Renames `temporary` to `path`. A folder that was at `path` is at `temporary` then, or removed."""
    failpoint("rename")
    try:
        temporary.rename(path)  # the system gives a folder no name that a file or a folder with files has
    except OSError:
        if not replace:
            raise
        if not _exchange(temporary, path):
            _replace(temporary, path)
    sync(path.parent)
    failpoint("renamed")


def _replace(temporary: Path, path: Path) -> None:
    replaced = path.with_name(_REPLACED + path.name)
    remove(replaced)
    path.rename(replaced)
    failpoint("replaced")
    temporary.rename(path)
    remove(replaced)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step, so that a kill finds either; False where the file system cannot (NFS, say)."""
    swap, here = getattr(ctypes.CDLL(None), "renameat2", None), -100  # AT_FDCWD
    return swap is not None and swap(here, os.fsencode(one.absolute()), here, os.fsencode(other.absolute()), _EXCHANGE) == 0


def discard(path: Path) -> None:
    """Removes a folder so that a kill midway leaves no damaged one under its name."""
    doomed = _unique(path)
    path.rename(doomed)
    failpoint("prune")
    remove(doomed)


def clean(folder: Path) -> None:
    """Tidies `folder` after a kill: removes unfinished and half-removed folders, and restores those that were about to be replaced."""
    for stray in folder.glob(TEMPORARY + "*"):
        remove(stray)
    for replaced in folder.glob(_REPLACED + "*"):
        path = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if path.exists():
            remove(replaced)
        else:
            replaced.rename(path)


def remove(path: Path) -> None:
    """Removes a file or a folder. Of a folder that stays, as another user's does, a warning is all."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        if path.is_dir():
            log.warning("%s: nothing needs this folder any more, but it cannot be removed. Remove it, or let its owner.", path)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, tree: Tree) -> None:
    """Writes JSON without a newline at the end: a file that lost its last byte must not parse."""
    path.write_text(json.dumps(tree, indent=1, allow_nan=False, ensure_ascii=False), encoding="utf-8", errors="backslashreplace")


def replace_file(path: Path, text: str | bytes | Iterable[bytes]) -> None:
    """Replaces a file atomically: a reader, and a kill of the writer, finds the old text or the new one, whole. Pieces go in one by one."""
    content = text.encode(errors="backslashreplace") if isinstance(text, str) else text  # of a file name that is not UTF-8, say
    with disk_errors(path), beside(path, Path.touch) as temporary:
        with temporary.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
        sync(temporary)
        temporary.replace(path)


def sync(path: Path) -> None:
    """Returns when a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if sys.platform == "darwin":  # whose fsync leaves it in the disk's own memory
            with suppress(OSError):  # a file system that cannot do more
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    finally:
        os.close(descriptor)
