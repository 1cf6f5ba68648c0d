"""Reads what others may have written: regular files only, up to a size, as text, JSON or yaml. Every refusal is a CheckpointError of one
sentence that names the file; nothing here waits for a pipe, fills the memory from a device, or builds an object that a file names."""

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from lm.errors import CheckpointError, ConfigError
from lm.schema import C, Tree, from_tree

MIB = 1 << 20
_DEEPEST = 900  # lists and objects within one another: Python 3.11 parses about as many, 3.13 thousands, which overflow later
_POINTER = b"version https://git-lfs"
_DEEPEST_ASKED = 150  # of a request, which another parser, with a limit of 200, reads next


def never_waiting(name: str, flags: int) -> int:
    """An opener that does not wait for whoever is at the other end of a pipe."""
    return os.open(name, flags | os.O_NONBLOCK, 0o666)


def read_bytes(path: Path, most_mib: int = 256) -> bytes:
    """Returns the content of a regular file of at most `most_mib` MiB."""
    with _opened(path) as file:
        data = file.read(most_mib * MIB + 1)
    _require_size(path, len(data), most_mib)
    _require_fetched(path, data)
    return data


def read_lines(path: Path, most_mib: int) -> Iterator[bytes]:
    """Yields the lines of a regular file of at most `most_mib` MiB, one after the other from the disk."""
    with _opened(path) as file:
        _require_size(path, os.fstat(file.fileno()).st_size, most_mib)
        yield from file


def refuse_pointer(path: Path) -> None:
    """Raises CheckpointError for what git has in place of a large file until git-lfs fetches it."""
    with _opened(path) as file:
        _require_fetched(path, file.read(len(_POINTER)))


def _require_fetched(path: Path, data: bytes) -> None:
    if data.startswith(_POINTER):
        raise CheckpointError(f"{path}: this is a pointer of git-lfs, which has not fetched the file yet. Run git lfs pull in its folder.")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb", opener=never_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path}: this is a pipe or a device, and only regular files are read. Replace it.")
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing, so this folder is not complete. Use another one.") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: cannot be read ({reason}). Check the path and its permissions.") from None


def closed(folder: Path) -> str | None:
    """Returns why the system shows nothing of what is in a folder, which then seems to be empty; None where it does, or there is none."""
    try:
        os.stat(os.path.join(folder, "."))  # a Path would drop the dot
    except PermissionError as error:
        return error.strerror
    except (OSError, ValueError):
        pass
    return None


def require_open(folder: Path) -> None:
    """Raises CheckpointError for a folder that is `closed`."""
    if reason := closed(folder):
        raise CheckpointError(f"{folder}: cannot be read ({reason}). Check the path and its permissions.")


def _require_size(path: Path, size: int, most_mib: int) -> None:
    if size > most_mib * MIB:
        raise CheckpointError(f"{path}: the file is over {most_mib} MiB, and such files are smaller. Restore the one that lm wrote.")


def read_text(path: Path, most_mib: int = 256) -> str:
    """Returns a UTF-8 text as it stands, line ends included."""
    return _text(path, read_bytes(path, most_mib))


def read_end(path: Path, most_mib: int, start: bytes) -> str:
    """Returns a UTF-8 text; of one that is over `most_mib` MiB its end, from the second byte of a `start` on."""
    with _opened(path) as file:
        begins = max(0, os.fstat(file.fileno()).st_size - most_mib * MIB)
        file.seek(begins)
        data = file.read(most_mib * MIB)
    return _text(path, data[data.find(start) + 1 :] if begins else data)


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: the file is damaged: byte {error.start} is not UTF-8. Restore it, or save it as UTF-8.") from None


def read_json(path: Path, foreign: bool = False) -> Tree:
    """Returns a JSON object that holds something.  foreign: another program wrote it, which may mean no limit by Infinity or by 10^30."""
    data = read_bytes(path)
    try:
        tree = parse_json(data, foreign)
    except ValueError as error:
        raise CheckpointError(f"{path}: the file is damaged: it is not JSON ({error}). Use another folder.") from None
    if not isinstance(tree, dict) or not tree:
        raise CheckpointError(f"{path}: the file is damaged: it must hold a JSON object. Use another folder.")
    return tree


def parse_json(data: bytes, foreign: bool = False, deepest: int = _DEEPEST) -> Any:
    """Returns a value whose numbers are finite and whose integers have at most 64 bits. Raises ValueError.

    foreign: numbers may be infinite, and longer integers become floats.  deepest: levels of lists and objects."""
    try:
        if foreign:
            return _shallow(data, json.loads(data, parse_constant=_number, parse_float=_number, parse_int=_nearest), deepest)
        return _shallow(data, json.loads(data, parse_constant=_finite, parse_float=_finite, parse_int=_of_64_bits), deepest)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_asked(data: bytes) -> Any:
    """As `parse_json`, for a request, but long integers pass, since its config refuses them by key. Raises ValueError for a key given
    twice."""
    try:
        return _shallow(data, json.loads(data, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_once), _DEEPEST_ASKED)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _shallow(data: bytes, found: Any, deepest: int) -> Any:
    """Returns what was found in the data. Raises ValueError where lists and objects are nested more deeply."""
    level = [found] if data.count(b"[") + data.count(b"{") >= deepest else []  # few brackets are never deep
    for _ in range(deepest):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not (level := [value for values in inner for value in values]):
            return found
    raise ValueError("it is nested too deeply")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)[:80]!r} is given twice")
    return tree


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return value


def _number(text: str) -> float:
    if math.isnan(value := float(text)):
        raise ValueError(f"{text} is no number")
    return value


def _nearest(text: str) -> int | float:
    return float(text) if len(text) > 20 or abs(int(text)) >= 1 << 63 else int(text)


def _of_64_bits(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= 1 << 63:
        raise ValueError(f"{text[:20]}... is beyond 64 bits" if len(text) > 20 else f"{text} is beyond 64 bits")
    return int(text)


def checked(cls: type[C], tree: Tree, where: Path) -> C:
    """Returns the content of a file as a config. Raises CheckpointError where a key is missing, not known, or of another type."""
    try:
        return from_tree(cls, tree, str(where))
    except ConfigError as error:
        raise CheckpointError(f"{str(error).splitlines()[-1]} Restore the file that lm wrote.") from None


def read_yaml(path: Path) -> Tree:
    """Returns a mapping of plain values. An alias is refused: `write_yaml` writes none, and a few of them unfold to any size."""
    text = read_text(path, most_mib=4)
    try:
        tree = yaml.load(text, _Plain)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date such as 2025-13-01
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: this is not plain yaml ({reason}). Restore the file that lm wrote.") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: there must be key: value pairs. Restore the file that lm wrote.")
    return tree


def yaml_text(tree: Tree) -> str:
    """Returns a tree as yaml, in the order of its keys."""
    return yaml.dump(tree, Dumper=_WithoutAliases, sort_keys=False, allow_unicode=True)


class _Plain(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias")
        return super().compose_node(parent, index)


class _WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True
