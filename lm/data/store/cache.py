"""Cache folders: each is built once, by one process at a time, whole or not at all; its key is everything that decides its content."""

import ast
import errno
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from lm.data.config import DataConfig
from lm.data.sources.base import Source
from lm.data.sources.fingerprint import short_hash
from lm.errors import ConfigError, ResourceError
from lm.schema import Slot
from lm.storage.atomic import free_bytes, sync
from lm.storage.lock import locked
from lm.storage.reading import closed

Log = Callable[[str], None]
ROOMS = ("sources", "records", "tokenizer", "store", "order")  # modules below lm/data that decide the tokens
CACHE_DIR: str = DataConfig.model_fields["cache_dir"].default

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    **dict.fromkeys(_FULL, "Free space"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Make it writable"),
    errno.EFBIG: "Raise the limit (ulimit -f)",
}


def code_version(*foreign: object) -> str:
    """Returns a hash of the code that turns sources into tokens, without comments and docstrings: a change in the ROOMS invalidates all
    older cache entries.

    foreign: configs and sources; where a plugin defines one's class, the plugin's file is hashed too.
    """
    data = Path(__file__).parents[1]
    files = [path for room in ROOMS for path in sorted([*data.glob(f"{room}.py"), *(data / room).glob("*.py")])]
    own = {file for each in foreign for cls in type(each).__mro__ if (file := _plugin_file(cls)) is not None}
    return short_hash([version("tokenizers"), *(_meaning(file, file.stat().st_mtime_ns) for file in [*files, *sorted(own)])])


@lru_cache(maxsize=256)
def _meaning(file: Path, changed_at: int) -> str:
    """Returns the syntax tree of a file without docstrings; comments and layout are not in it.  changed_at: only a key for the cache."""
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    return ast.dump(tree)


def _plugin_file(cls: type) -> Path | None:
    """Returns the plugin file that defines a kind's class; None for classes of lm and for other base classes."""
    if not issubclass(cls, Slot | Source) or cls.__module__.partition(".")[0] == "lm":
        return None
    try:
        return Path(inspect.getfile(cls))
    except (TypeError, OSError):
        raise ConfigError(
            f"{cls.__qualname__}: no file defines this class, so that a change of it would go unnoticed and old tokens be read."
            " Define it in a file of its own."
        ) from None


def cache_root(cache_dir: str, log: Log) -> Path:
    """Creates and returns the cache folder; one that can only be read serves for what is in it. If the default one cannot be written (a
    read-only home), one for this user below the system's temporary folder.

    Raises ConfigError for a URL; ResourceError where a folder other than the default cannot be created or read: machines that share a
    cache must not each use a cache of their own.
    """
    if "://" in cache_dir:
        raise ConfigError(f"data.cache_dir={cache_dir}: tokens are read from a folder. Write data.remote={cache_dir} instead.")
    root = Path(os.path.expanduser(cache_dir))
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        if cache_dir != CACHE_DIR:
            if root.is_dir() and not closed(root):
                return root  # others have filled it: what is in it can be read, and only what is not would be written
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
    """Returns `folder`; if it does not exist, builds it by `build(temporary folder)`. A second process waits for the first.

    The temporary folder that a killed process left, or one whose disk was full, is removed, or, with `resume`, passed to `build`.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{folder.name}.lock"), lambda: log(f"Another process builds {folder.name}; waiting for it.")):
            if not folder.is_dir():
                _build(folder, build, resume)
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        free = f"; {free_bytes(folder):,} bytes free" if error.errno in _FULL else ""
        remedy = f"{_REMEDIES[error.errno]} or set data.cache_dir"
        if resume and _half_of(folder).exists():
            remedy += f": what is done is kept in {_half_of(folder).name} beside it, and the same command goes on"
        raise ResourceError(f"data.cache_dir: {folder} cannot be written ({error.strerror}{free}). {remedy}.") from None
    return folder


def _half_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.half")


def _build(folder: Path, build: Callable[[Path], None], resume: bool) -> None:
    half = _half_of(folder)
    if not resume:
        shutil.rmtree(half, ignore_errors=True)
    half.mkdir(exist_ok=True)
    try:
        build(half)
        for path in (*half.rglob("*"), half):
            sync(path)
        half.rename(folder)
        sync(folder.parent)
    except Exception as error:
        if not (resume and isinstance(error, OSError | ResourceError)):  # what is full or out of reach may be there again
            shutil.rmtree(half, ignore_errors=True)
        raise
