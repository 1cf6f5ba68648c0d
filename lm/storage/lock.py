"""One process per run folder, and locks that others wait for."""

import errno
import fcntl
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TextIO

from lm.errors import ResourceError
from lm.storage.atomic import disk_errors
from lm.storage.reading import never_waiting

LOCK = "run.lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)  # Lustre or NFS without locks; on macOS the last two differ
log = logging.getLogger("lm")


@contextmanager
def locked(path: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Within the block, no other process holds this lock (flock on the file, which stays).  waits: called before waiting for another
    process that holds it.  Raises ResourceError where the file system has no locks: two processes would spoil each other's work."""
    with open(path, "w", opener=never_waiting) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            fault = f"its file system has no locks ({error.strerror}), which keep several processes from writing it at once"
            raise ResourceError(f"{path.parent}: {fault}. Choose another one, on a local disk, say: data.cache_dir for tokens.") from None
        yield


class RunLock:
    """One process per run folder, by flock on `run.lock`. The kernel drops it with its holder, so a stale file blocks nobody.

    On a file system without locks there is only a warning: a run alone in its folder needs none.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._file: TextIO | None = None
        os.register_at_fork(after_in_child=self._close)  # else a loader worker that outlives us would keep the lock

    def __enter__(self) -> Self:
        above = (self._path.parent, *self._path.parent.parents)
        if (link := next((each for each in above if each.is_symlink() and not each.exists()), None)) is not None:
            raise ResourceError(f"{link}: it is a link to {os.readlink(link)}, which is not there. Make that folder, or remove the link.")
        with disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a+", encoding="utf-8", errors="replace", opener=_not_elsewhere)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._refuse(self._file)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                fault = f"the file system has no locks ({error.strerror}), so nothing keeps a second process out"
                log.warning("%s: %s. Start this run only once at a time.", self._path.parent, fault)
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


def in_use(folder: Path) -> bool:
    """Whether a process writes the run in this folder."""
    try:
        with open(folder / LOCK, opener=never_waiting) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no lock yet, or no file system of locks: the run itself tells
    return False


def _not_elsewhere(name: str, flags: int) -> int:
    """An opener that follows no symbolic link, whose target would lose its content, and does not wait for the reader of a pipe."""
    return never_waiting(name, flags | os.O_NOFOLLOW)
