"""Cache folders that are also kept at a URL: built by one machine, fetched by the others, file by file as they are read."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lm.data.store.cache import Log, build_once
from lm.errors import CheckpointError, ConfigError, ResourceError
from lm.progress import progress
from lm.storage.atomic import TEMPORARY, disk_errors, replace_file
from lm.storage.lock import locked
from lm.storage.reading import closed, read_json
from lm.storage.remote import exists, fetch, put, require_writable

Checked = Mapping[str, Callable[[Path], bool]]
"""Names of files, each with what says whether a copy is as it should be; those before it are beside the copy by then."""
_ORIGIN = "origin.url"  # file with the URL at which its folder is kept


def is_json(copy: Path) -> bool:
    """Whether the file holds a non-empty JSON object."""
    try:
        return bool(read_json(copy))
    except CheckpointError:
        return False


TOKENS: Checked = {"index.json": is_json}


def shared_once(
    folder: Path, build: Callable[[Path], None], log: Log, remote: str | None, files: Checked = TOKENS, resume: bool = False
) -> Path:
    """Returns `folder`: fetched where `remote` has it, else built as by `build_once` and uploaded there.

    files: the files that are fetched at once, with checks. The last one is uploaded last, so that a remote folder which has it is whole.
    """
    if not fetched(folder, log, remote, files):
        if remote is not None:
            require_writable(remote)
        build_once(folder, lambda half: _anew(half, build), log, resume)
    if remote is not None and not _is_there(folder, url := _url(folder, remote)):  # else nothing is written, and a cache may be read-only
        with _alone(folder, lambda: log(f"Another process puts {folder.name} at {url}; waiting for it.")):
            _put(folder, url, files)
    return folder


def fetched(folder: Path, log: Log, remote: str | None, files: Checked = TOKENS) -> bool:
    """Returns whether the folder is on this machine; fetches it first where only `remote` has it. Raises ResourceError for one that only
    another user may read."""
    for there in (folder.parent, folder):
        if (fault := closed(there)) is not None:
            raise ResourceError(f"data.cache_dir: {there} cannot be read ({fault}). Let its owner make it readable, or set data.cache_dir.")
    if remote is None or folder.is_dir():
        return folder.is_dir()
    url = _url(folder, remote)
    if not exists(f"{url}/{_last(files)}"):
        return False
    log(f"{folder.name}: found at {url}.")
    build_once(folder, lambda half: _begin(url, half, files), log)
    return True


def brought(file: Path, whole: Callable[[Path], bool]) -> Path:
    """Returns the file; fetches it first where its folder is kept at a URL and it is not here yet. Other processes of this machine wait.

    whole: checks a fetched copy.  Raises as `fetch` does.
    """
    origin = file.with_name(_ORIGIN)
    if not file.exists() and origin.is_file():
        with _alone(file.parent, lambda: None):
            if not file.exists():
                fetch(f"{origin.read_text()}/{file.name}", file, whole)
    return file


def may_come(folder: Path) -> bool:
    """Whether the folder's missing files can be fetched from a URL."""
    return (folder / _ORIGIN).is_file()


@contextmanager
def _alone(folder: Path, waits: Callable[[], None]) -> Iterator[None]:
    with disk_errors(folder), locked(folder.with_name(f"{folder.name}.lock"), waits):
        yield


def _begin(url: str, half: Path, files: Checked) -> None:
    for name, whole in files.items():
        fetch(f"{url}/{name}", half / name, whole)
    (half / _ORIGIN).write_text(url)


def _anew(half: Path, build: Callable[[Path], None]) -> None:
    (half / _ORIGIN).unlink(missing_ok=True)  # left by a killed process that was fetching a copy which is gone now
    build(half)


def _is_there(folder: Path, url: str) -> bool:
    """Whether the folder is known to be kept at the URL. Raises ConfigError where it is kept at another one."""
    origin = folder / _ORIGIN
    if not origin.is_file():
        return False
    if (other := origin.read_text()) != url:
        raise ConfigError(f"data.remote: {folder} is a copy of {other}, not of {url}. Use that URL, or another data.cache_dir.")
    return True


def _put(folder: Path, url: str, files: Checked) -> None:
    if _is_there(folder, url):  # by now: another process was faster
        return
    last = folder / _last(files)
    names = [*sorted(path for path in folder.iterdir() if path != last and not _unfinished(path)), last]
    sent = 0
    with progress(f"Uploading to {url}", sum(path.stat().st_size for path in names)) as done:
        for path in names:
            put(path, f"{url}/{path.name}")
            done(sent := sent + path.stat().st_size)
    replace_file(folder / _ORIGIN, url)


def _last(files: Checked) -> str:
    return [*files][-1]


def _unfinished(path: Path) -> bool:
    """Whether a file is an unfinished one that a killed process left."""
    return path.suffix == ".half" or path.name.startswith(TEMPORARY)


def _url(folder: Path, remote: str) -> str:
    return f"{remote.rstrip('/')}/{folder.parent.name}/{folder.name}"
