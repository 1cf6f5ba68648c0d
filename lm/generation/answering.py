"""A file of prompts, answered into another file. What a kill leaves is gone on with by the same command."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lm.data.records.chat import ChatRecord
from lm.data.records.fields import BadRecord
from lm.data.records.messages import tools_of
from lm.data.records.preference import PreferenceRecord
from lm.data.records.rated import RatedRecord
from lm.data.sources.base import ASSISTANT, Turn
from lm.data.tokenizer.gap import Gap
from lm.errors import ConfigError
from lm.generation.decode import room
from lm.generation.lines import add_line, digest, gone_on_with, read_lines
from lm.generation.sampling import row_keys
from lm.generation.writer import Completion, Writer
from lm.schema import Tree

ANSWERS = "answers"  # the field that is added to each line
_AT_ONCE = 1024  # prompts whose rows exist at once


@dataclass(frozen=True)
class Prompt:
    """A line of a file of prompts: its object, what is asked (a text, a gap in one, or the turns so far), and the place for errors."""

    line: Tree
    asked: str | Gap | list[Turn]
    where: str


def read_prompts(path: Path) -> list[Prompt]:
    """Returns what the lines of a file ask, each a JSON object with the field `prompt`, which may have a `suffix` beside it, or `messages`;
    what else is in it goes along into the answers. Raises ConfigError for a line that is none, and where not all lines have the same."""
    prompts = [_prompt(line, where) for line, where in read_lines(path, "prompts")]
    if not prompts:
        raise ConfigError(f'{path}: it holds no prompt. Write a line such as {{"prompt": "def main("}} for each.')
    for prompt in prompts:
        if type(prompt.asked) is not type(prompts[0].asked):
            raise ConfigError(f"{prompt.where}: it asks otherwise than line 1. Keep prompts, those with suffix, and messages apart.")
    return prompts


def _prompt(line: Any, where: str) -> Prompt:
    if not isinstance(line, dict) or ("prompt" in line) == ("messages" in line):
        raise ConfigError(f"{where}: it is no object with either prompt or messages. Fix the line.")
    if ANSWERS in line:
        raise ConfigError(f"{where}: it has the field {ANSWERS} already, which is written here. Rename it.")
    if "messages" in line:
        return Prompt(line, turns_of(line, where), where)
    prompt, suffix = line["prompt"], line.get("suffix")
    if not isinstance(prompt, str) or not isinstance(suffix, str | None):
        raise ConfigError(f"{where}: {'suffix' if isinstance(prompt, str) else 'prompt'} is no string. Fix the line.")
    return Prompt(line, prompt if suffix is None else Gap(prompt, suffix), where)


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


def _ids(writer: Writer, prompt: Prompt) -> list[int]:
    try:
        ids = writer.ids(prompt.asked)
        room(writer.model, ids, writer.cfg)
    except ConfigError as error:
        raise ConfigError(f"{prompt.where}: {error}") from None
    return ids
