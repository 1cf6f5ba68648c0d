"""Which files are read: those that files, folders and globs name, by their endings."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from lm.data.sources.compressed import PACKED
from lm.data.sources.hub import is_saved
from lm.errors import ConfigError
from lm.storage.reading import closed
from lm.units import counted

_TEXT = (".txt", ".md", ".rst", ".py")  # each such file is one document
_KINDS = (*_TEXT, ".jsonl", ".json", ".csv", ".tsv", ".parquet")
_TABLES = (".arrow", ".feather", ".orc", ".avro", ".ndjson", ".xlsx")
_TOKENS = (".bin", ".idx", ".npy", ".npz")  # as other programs keep them
_PAPERS = (".html", ".xml", ".tex", ".pdf", ".epub", ".docx")
_OPEN = "Make it readable or leave it out."
_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".xz", ".bz2", ".lz4", *PACKED)


def find_files(given: str | list[str], key: str) -> list[Path]:
    """Returns the files that files, folders and globs name, each once, sorted. Of a folder those with a known ending below it, without
    dot-files and linked folders. Raises ConfigError where there is none, and for a folder that cannot be read.  key: the option that gave
    them."""
    patterns = [given] if isinstance(given, str) else given
    try:
        named = sorted({path for pattern in patterns for path in _matches(pattern, key)})
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename} cannot be read ({error.strerror}). {_OPEN}") from None
    found = {(os.path.realpath(path.parent), path.name): path for path in reversed(named)}  # a file may be named in several ways
    if not found:
        folders = [folder for pattern in patterns for folder in _named(pattern)]
        if saved := [folder for folder in folders if is_saved(folder)]:
            raise ConfigError(f"{key}: {saved[0]} was written by save_to_disk. Read it with data=hub data.name={saved[0]}.")
        only_named, others = _unread(patterns)
        told = f" but {counted(len(only_named), '.json file')}, read only where named, as {key}={only_named[0]}" if only_named else ""
        told = told or (f" but {counted(len(others), 'file')} of other kinds ({_first(others)})" if others else "")
        linked = _linked(patterns, [])
        told = told or (f" but {counted(len(linked), 'linked folder')}, read only where named, as {key}={linked[0]}" if linked else "")
        raise ConfigError(f"{key}: {given} holds no file to read{told}. Give files ending in {_endings(but='.json')}.")
    return sorted(found.values())


def left_out(given: str | list[str], key: str, read: Sequence[Path]) -> list[str]:
    """Returns sentences on the files in these folders that look like data and are not read.  read: those that are."""
    known = set(read)
    only_named, others = ([path for path in paths if path not in known] for paths in _unread([given] if isinstance(given, str) else given))
    found = []
    if only_named:
        found.append(f"{key}: {counted(len(only_named), '.json file')} left out ({_first(only_named)}); name what is to be read.")
    if others:
        found.append(f"{key}: {counted(len(others), 'file')} of other kinds left out ({_first(others)}); convert what is to be read.")
    if linked := _linked([given] if isinstance(given, str) else given, read):
        found.append(f"{key}: {counted(len(linked), 'linked folder')} left out ({_first(linked)}); name what is to be read.")
    return found


def kind_of(path: Path) -> str:
    """Returns a file's ending without .gz or .zst; .txt for every kind of text."""
    name = path.with_suffix("") if path.suffix.lower() in PACKED else path
    ending = name.suffix.lower()
    return ".txt" if ending in _TEXT else ending


def _matches(pattern: str, key: str) -> Iterator[Path]:
    paths = _named(pattern)
    if not paths:
        for parent in reversed(Path(os.path.expanduser(pattern)).absolute().parents):
            if reason := closed(parent):
                raise ConfigError(f"{key}: {parent} cannot be read ({reason}). {_OPEN}")
        raise ConfigError(f"{key}: {pattern} does not exist. Give a file, a folder or a glob that matches something.")
    for each in paths:
        if each.is_dir():
            yield from filter(_is_read, _below(each))
        elif _is_known(each):
            yield each
        else:
            made = " Tokens are made here: give the text that these were made of." if each.suffix.lower() in _TOKENS else ""
            raise ConfigError(f"{key}: {each} has an ending that is not known. Known endings: {_endings()}.{made}")


def _named(pattern: str) -> list[Path]:
    path = Path(os.path.expanduser(pattern))
    return [path] if os.path.exists(path) else [Path(name) for name in glob.glob(str(path), recursive=True)]


def _unread(patterns: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Returns the .json files in these folders, which are read only where they are named, and files that look like data of other kinds."""
    folders = [path for pattern in patterns for path in _named(pattern) if path.is_dir()]
    found = sorted({path for folder in folders for path in _below(folder) if not _is_read(path)})
    others = [path for path in found if not _is_known(path) and path.suffix.lower() in (*_TABLES, *_TOKENS, *_PAPERS, *_ARCHIVES)]
    return [path for path in found if _is_known(path) and kind_of(path) == ".json"], others


def _linked(patterns: Sequence[str], read: Sequence[Path]) -> list[Path]:
    """Returns the links to folders in these folders that hold files which are not read.  read: those that are."""
    folders = [path for pattern in patterns for path in _named(pattern) if path.is_dir()]
    below = {Path(at, name) for folder in folders for at, names, _ in os.walk(folder) for name in names if not name.startswith(".")}
    known = {os.path.realpath(path) for path in read}
    holds = {path: {os.path.realpath(file) for file in _below(path) if _is_read(file)} for path in sorted(below) if path.is_symlink()}
    return [path for path, files in holds.items() if files - known]


def _first(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths[:3])) + (", ..." if len(paths) > 3 else "")


def _below(root: Path) -> Iterator[Path]:
    """Yields the files below a folder, without hidden ones."""
    for folder, below, names in os.walk(root, onerror=_refuse):
        below[:] = [name for name in below if not name.startswith(".") and name != "lost+found"]  # the latter is root's, on each disk
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _is_read(path: Path) -> bool:
    """Whether a file in a folder is read."""
    return _is_known(path) and kind_of(path) != ".json" and path.is_file()  # a .json may be anything


def _is_known(path: Path) -> bool:
    kind = kind_of(path)
    return kind in _KINDS and (kind != ".parquet" or path.suffix.lower() == kind)  # parquet packs its own columns


def _refuse(error: OSError) -> None:
    raise error


def _endings(but: str = "") -> str:
    return f"{', '.join(kind for kind in _KINDS if kind != but)}, and all but .parquet also with {' or '.join(PACKED)}"
