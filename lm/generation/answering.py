"""A file of prompts, answered into another file. What a kill leaves is gone on with by the same command."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from lm.data.records.chat import ChatRecord
from lm.data.records.fields import BadRecord
from lm.data.records.messages import tools_of
from lm.data.records.preference import PreferenceRecord
from lm.data.records.rated import RatedRecord
from lm.data.sources.base import ASSISTANT, Turn
from lm.errors import ConfigError, ResourceError
from lm.generation.decode import room
from lm.generation.sampling import row_keys
from lm.generation.writer import Completion, Writer
from lm.schema import Tree
from lm.storage.atomic import beside, disk_errors, sync
from lm.storage.reading import parse_asked, parse_json, read_bytes

ANSWERS = "answers"  # the field that is added to each line
_OTHERS = {".csv", ".tsv", ".xlsx", ".parquet", ".arrow", ".npy", ".npz", ".pt", ".gz", ".zst", ".md"}  # endings of other formats
_MOST_MIB = 4096
_AT_ONCE = 1024  # prompts whose rows exist at once


@dataclass(frozen=True)
class Prompt:
    """A line of a file of prompts: its object, what is asked (a text, or the turns so far), and the place for errors."""

    line: Tree
    asked: str | list[Turn]
    where: str


def read_prompts(path: Path) -> list[Prompt]:
    """Returns what the lines of a file ask, each a JSON object with the field `prompt` or `messages`; what else is in it goes along into
    the answers. Raises ConfigError for a line that is none, and where lines have not all the same field."""
    prompts = [_prompt(line, where) for line, where in read_lines(path, "prompts")]
    if not prompts:
        raise ConfigError(f'{path}: it holds no prompt. Write a line such as {{"prompt": "def main("}} for each.')
    for prompt in prompts:
        if isinstance(prompt.asked, str) != isinstance(prompts[0].asked, str):
            raise ConfigError(f"{prompt.where}: prompts and messages are in one file. Keep them in files of their own.")
    return prompts


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


def _prompt(line: Any, where: str) -> Prompt:
    if not isinstance(line, dict) or ("prompt" in line) == ("messages" in line):
        raise ConfigError(f"{where}: it is no object with either prompt or messages. Fix the line.")
    if ANSWERS in line:
        raise ConfigError(f"{where}: it has the field {ANSWERS} already, which is written here. Rename it.")
    if "messages" in line:
        return Prompt(line, turns_of(line, where), where)
    if not isinstance(line["prompt"], str):
        raise ConfigError(f"{where}: prompt is no string. Fix the line.")
    return Prompt(line, line["prompt"], where)


def turns_of(line: Tree, where: str) -> list[Turn]:
    """Returns the turns in `messages`, as of a chat of training up to here: `tools` and tool calls count, and content may come in parts.
    where: the place for errors. Raises ConfigError."""
    with _of_a_file():
        return [*tools_of(line, where), *ChatRecord().messages_of(line, "messages", "messages", where)]


def chat_of(line: Tree, field: str | None, where: str) -> list[Turn]:
    """Returns the turns of a whole chat, read as training reads such a record.  field: of its messages, or which of two answers to a prompt
    is meant, chosen or rejected. None: its fields tell.  where: as in `turns_of`."""
    with _of_a_file():
        if {"chosen", "rejected"} <= line.keys():
            *before, chosen, rejected = PreferenceRecord().recognised(line, where)[0].turns(line, where)
            if field not in ("chosen", "rejected"):
                raise ConfigError(f"{where}: chosen and rejected are two chats. Set field=chosen, or field=rejected.")
            return [*before, (chosen if field == "chosen" else rejected)._replace(role=ASSISTANT)]
        return RatedRecord(messages=field).recognised(line, where)[0].said(line, where)  # whose answer may be a bad one


@contextmanager
def _of_a_file() -> Iterator[None]:
    """Tells what is wrong with a record without the remedy that is of training."""
    try:
        yield
    except BadRecord as error:
        raise ConfigError(f"{error.sentence.rpartition('. ')[0]}. Fix the line.") from None


def answer_all(
    writer: Writer, prompts: Sequence[Prompt], out: Path, asked: Tree, told: Callable[[int, int], None], anew: bool = False
) -> tuple[int, int]:
    """Writes a file with a line for each prompt: its object and `answers`, the list of cfg.n completions. Returns how many prompts were
    answered here, and with how many tokens.

    The answers are those that `Writer.complete` gives for all prompts at once, whatever was answered before a kill. They grow as they end,
    those to the longest prompts first, in a hidden file beside `out`, which comes into being when it is complete.  asked: what decides the
    answers, by key; a start that was ended is gone on with only where it is the same.  told: called with each prompt that is answered: how
    many are so far, and the tokens drawn here.  anew: replace a file at `out`, and what a start with another `asked` has left.
    Raises ConfigError as `complete` does, before anything is drawn, and ResourceError where the file cannot be written.
    """
    encoded, n, so_far, n_tokens = [_ids(writer, prompt) for prompt in prompts], writer.cfg.n, 0, 0
    keys = row_keys([ids for ids in encoded for _ in range(n)], writer.cfg.seed)
    with gone_on_with(out, asked | {"prompts": digest([prompt.line for prompt in prompts])}, anew) as (file, done):
        left = [i for i in range(len(prompts)) if i not in done]
        left.sort(key=lambda i: -len(encoded[i]))  # a batch takes the time of its longest prompt for each of its rows

        def keep(some: Sequence[int], j: int, found: list[Completion]) -> None:
            nonlocal so_far, n_tokens
            add_line(file, some[j], prompts[some[j]].line | {ANSWERS: [asdict(completion) for completion in found]})
            so_far, n_tokens = so_far + 1, n_tokens + sum(completion.n_tokens for completion in found)
            told(len(done) + so_far, n_tokens)

        for start in range(0, len(left), _AT_ONCE):
            some = left[start : start + _AT_ONCE]
            own = [key for i in some for key in keys[i * n : (i + 1) * n]]
            writer.continued([encoded[i] for i in some], keys=own, on_done=partial(keep, some))
    return so_far, n_tokens


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


def _ids(writer: Writer, prompt: Prompt) -> list[int]:
    try:
        ids = writer.ids(prompt.asked)
        room(writer.model, ids, writer.cfg)
    except ConfigError as error:
        raise ConfigError(f"{prompt.where}: {error}") from None
    return ids


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
    the block it becomes `out`.  asked, anew: as in `answer_all`."""
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
