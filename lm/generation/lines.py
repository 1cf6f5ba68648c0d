"""Files of JSON lines: how they are read, and how one is written line by line, so that the same command goes on behind a kill."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lm.errors import ConfigError, ResourceError
from lm.schema import Tree
from lm.storage.atomic import beside, disk_errors, sync
from lm.storage.reading import parse_asked, parse_json, read_bytes

_OTHERS = {".csv", ".tsv", ".xlsx", ".parquet", ".arrow", ".npy", ".npz", ".pt", ".gz", ".zst", ".md"}  # endings of other formats
_MOST_MIB = 4096


def _value(data: bytes, where: str) -> Any:
    try:
        return parse_asked(data)
    except ValueError as error:  # UnicodeDecodeError too
        raise ConfigError(f"{where}: it is not JSON ({error}). Fix the line.") from None


def read_file(path: Path, key: str) -> bytes:
    """Returns what is in a file that an option named `key` names, without a byte-order mark. Raises ConfigError where there is none."""
    if not path.is_file():
        found = "this is no regular file" if path.exists() else "there is no such file"
        raise ConfigError(f"{key}={path}: {found}. Name one of JSON lines.")
    return read_bytes(path, _MOST_MIB).removeprefix(b"\xef\xbb\xbf")


def read_lines(path: Path, key: str, parse: Callable[[bytes, str], Any] = _value) -> list[tuple[Any, str]]:
    """Returns the value of each line of a file of JSON lines, and its place for errors; blank lines are left out. Raises ConfigError for
    one that is none.  key: the option that names the file.  parse: makes the value of a line and its place, where it is no JSON."""
    lines = read_file(path, key).split(b"\n")
    return [(parse(data, where), where) for number, data in enumerate(lines, 1) if data.strip() and (where := f"{path}, line {number}")]


def require_lines(out: Path, anew: bool, key: str = "out", read: Path | None = None) -> None:
    """Raises ConfigError as `require_new` does, for a name that promises another format than JSON lines, and for the file that is read."""
    require_new(out, anew, key)
    if out.suffix.lower() in _OTHERS:
        raise ConfigError(f"{key}={out}: it would hold JSON lines, and {out.suffix} is the ending of another format. Let it end in .jsonl.")
    if read is not None and out.exists() and out.samefile(read):
        raise ConfigError(f"{key}={out}: it is the file that is read, which would be gone. Choose another file.")


def require_new(out: Path, anew: bool, key: str = "out") -> None:
    """Raises ConfigError where `out` exists; with `anew`, only where it is no file.  key: the option that names it."""
    if os.path.lexists(out) and not (anew and out.is_file()):
        remedy = "Add overwrite=true to replace it, or choose another file" if out.is_file() else "Choose another name"
        raise ConfigError(f"{key}={out}: it exists already. {remedy}.")


def digest(lines: Sequence[Tree]) -> str:
    """Returns a hash of the lines of a file."""
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def add_line(file: BinaryIO, number: int, line: Tree) -> None:
    """Writes a line, in whatever order, that has this number in what `file` becomes; half a surrogate pair as JSON escapes it."""
    file.write(b"%d %s\n" % (number, json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace")))
    file.flush()


@contextmanager
def gone_on_with(out: Path, asked: Tree, anew: bool) -> Iterator[tuple[BinaryIO, set[int]]]:
    """Yields the hidden file that grows beside `out` by `add_line`, and the numbers of the lines that an ended start has left there; behind
    the block it becomes `out`. Raises ConfigError as `require_new` and where an ended start asked otherwise, ResourceError where another
    process writes it, or the disk does not take it.

    asked: what decides the lines, by key; a start is gone on with only where it is the same.  anew: replace a file at `out`, and what a
    start with another `asked` has left."""
    require_new(out, anew)
    part = out.with_name(f".{out.name}.part")
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ResourceError(f"out={out}: another process is writing it. Stop that one, wait, or choose another file.") from None
            require_new(out, anew)  # again, since another process may just have written it
            done = _lines_of(file, out, asked, anew)
            yield file, done
            _publish(file, out)
            part.unlink(missing_ok=True)


def _lines_of(file: BinaryIO, out: Path, asked: Tree, anew: bool) -> set[int]:
    """Returns the numbers of the whole lines in the file, after cutting off what is behind them; a new file gets its head."""
    file.seek(0)
    head = file.readline()
    done, end = set[int](), len(head)
    for line in file:
        if not (line.endswith(b"\n") and (number := line.partition(b" ")[0]).isdigit()):
            break
        done.add(int(number))
        end += len(line)
    before = _parsed(head) if head.endswith(b"\n") else {}
    if before != asked and done and not anew:
        differ = [key for key in asked | before if before.get(key) != asked.get(key)]
        raise ConfigError(
            f"out={out}: {len(done)} answers are there of a start that asked otherwise ({', '.join(differ[:3])})."
            " Ask as it did, add overwrite=true to begin anew, or choose another file."
        )
    if before == asked:
        file.truncate(end)
        return done
    file.truncate(0)
    file.write(json.dumps(asked).encode() + b"\n")
    file.flush()
    return set()


def _parsed(head: bytes) -> Tree:
    """Returns the object in the first line; {} where it is damaged."""
    try:
        found = parse_json(head)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _publish(file: BinaryIO, out: Path) -> None:
    """Writes the lines of the hidden file to `out`, in the order of their numbers and without these and the head."""
    file.seek(0)
    start, starts = len(file.readline()), list[tuple[int, int]]()
    for line in file:
        starts.append((int(line.partition(b" ")[0]), start))
        start += len(line)
    with beside(out, Path.touch) as temporary, open(temporary, "wb") as copy:
        for _, start in sorted(starts):
            file.seek(start)
            copy.write(file.readline().partition(b" ")[2])
        copy.flush()
        sync(temporary)
        temporary.replace(out)
