"""Folders that are built once: by one process at a time, whole or not at all, keyed by what decides their content."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm.data.config import DataConfig
from lm.errors import ConfigError, ResourceError

Log = Callable[[str], None]
CACHE_DIR: str = DataConfig.model_fields["cache_dir"].default

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


def short_hash(value: Any) -> str:
    """16 hexadecimal digits of a plain JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def code_version() -> str:
    """A hash of the code that turns sources into tokens: a change in these rooms makes all older entries unfound."""
    data = Path(__file__).parents[1]
    files = [path for room in ("sources", "tokenizer", "store") for path in sorted((data / room).glob("*.py"))]
    return short_hash([version("tokenizers"), *(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)])


def cache_root(cache_dir: str, log: Log) -> Path:
    """The folder, created. Where the usual one cannot be (a read-only home), one of this user below the system's temporary folder.

    Raises ResourceError for any other: machines that share a cache must not each go on with one of their own.
    """
    root = Path(cache_dir).expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        if cache_dir != CACHE_DIR:
            raise ResourceError(f"data.cache_dir={cache_dir}: it cannot be written ({error.strerror}). Choose a folder that can.") from None
        spare = Path(tempfile.gettempdir()) / f"lm-cache-{os.getuid()}"
        log(f"data.cache_dir: {root} cannot be written ({error.strerror}); using {spare}.")
    try:
        spare.mkdir(mode=0o700, exist_ok=True)
        owner = spare.stat().st_uid
    except OSError as error:
        raise ResourceError(f"data.cache_dir: neither {root} nor {spare} can be written ({error.strerror}). Set data.cache_dir.") from None
    if owner != os.getuid():
        raise ResourceError(f"data.cache_dir: {root} cannot be written and {spare} belongs to another user. Set data.cache_dir.")
    return spare


def build_once(folder: Path, build: Callable[[Path], None], log: Log, resume: bool = False) -> Path:
    """`folder`, after `build(temporary folder)` where it does not exist. A second process waits.

    What a killed process left is removed, or with `resume` given to `build`.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock"), log):
            if not folder.is_dir():
                _build(folder, build, resume)
    except OSError as error:
        if error.errno not in _DISK:
            raise
        free = shutil.disk_usage(folder.parent).free
        fault = f"{error.strerror}; {free:,} bytes free"
        raise ResourceError(f"data.cache_dir: {folder} cannot be written ({fault}). Free space or set data.cache_dir.") from None
    return folder


def _build(folder: Path, build: Callable[[Path], None], resume: bool) -> None:
    half = folder.with_name(f"{folder.name}.half")
    if not resume:
        shutil.rmtree(half, ignore_errors=True)
    half.mkdir(exist_ok=True)
    try:
        build(half)
        half.rename(folder)
    except Exception:
        shutil.rmtree(half, ignore_errors=True)
        raise


def file_hashes(paths: Sequence[Path], root: Path) -> dict[str, str]:
    """SHA-256 by path; remembered for as long as size, modification and inode-change time of every file stay."""
    try:
        stats = [(str(path.absolute()), (s := path.stat()).st_size, s.st_mtime_ns, s.st_ctime_ns) for path in paths]
        memo = root / "hashes" / f"{short_hash(stats)}.json"
        found = json.loads(memo.read_bytes()) if memo.is_file() else [_file_hash(path) for path in paths]
    except OSError as error:
        raise ConfigError(f"data.files: {error.filename} cannot be read ({error.strerror}). Make it readable or leave it out.") from None
    if not memo.exists():
        memo.parent.mkdir(exist_ok=True)
        half = memo.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(found))
        half.rename(memo)
    return dict(zip(map(str, paths), found, strict=True))


def _file_hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _locked(path: Path, log: Log) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"Another process builds {path.stem}; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
