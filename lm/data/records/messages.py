"""Records of messages: reading the messages, and writing them with a chat template."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lm.data.records.base import GIVEN, LEARNED, OTHER, Passage, RecordConfig, Values
from lm.data.records.fields import bad_record, listed, shown, text_of, value_of
from lm.data.sources.base import ASSISTANT, ROLES, THOUGHTS, TOOLS, Document, Split, Turn
from lm.data.tokenizer.config import TEMPLATES
from lm.data.tokenizer.templates import template_source
from lm.data.tokenizer.together import together
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError

if TYPE_CHECKING:
    from lm.data.tokenizer.chat import ChatTemplate, Run

_ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}
_CALL, _SEEN = "function_call", "observation"  # roles of ShareGPT's chats with tools: the assistant's calls as JSON, and their results
_FIRST = ("system", "developer")  # roles of a message that a chat begins with
_WEIGHTS = ("weight", "train")  # fields by which OpenAI's format and axolotl's say that an assistant's message is not to be learned
_BESIDE = ("name", "tool_calls", "tool_call_id", *THOUGHTS, *_WEIGHTS)  # fields of a message that are read beside its role and content


class MessagesRecord(RecordConfig):
    """How messages are read and written."""

    role_field: str | None = None
    """Field of a message that says who speaks; human and gpt are read as user and assistant. null: role, or else from."""
    content_field: str | None = None
    """Field of a message that holds its text. null: content, or else value."""
    system: str | None = None
    """Field of a system prompt, for messages that do not begin with one. null: system, where the record's fields tell its form."""
    history: str | None = None
    """Field of earlier turns beside a question and its answers, for those that are no messages: a list of pairs of what the user says and
    the answer. null: history, where the record's fields tell its form."""
    template: str | None = None
    """plain, chatml, llama3, gemma, alpaca, or the path of a jinja template. null: the tokenizer's own, else plain."""

    def specials(self) -> tuple[str, ...]:
        return TEMPLATES.get(self.template or "", ())

    def named_template(self) -> str | None:
        return self.template

    def chat_template(self, tokenizer: Tokenizer) -> str | None:
        return template_source(self.template, tokenizer)[0]

    def passages(self, documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Passage]:
        from lm.data.tokenizer.chat import ChatTemplate  # brings jinja2, which composing a config need not wait for

        template = ChatTemplate(*template_source(self.template, tokenizer), tokenizer)
        for document in documents:
            try:
                runs = self.runs(document.turns, template)
            except ConfigError as error:
                document.refuse(error)
            else:
                yield from _run_passages(document.split, runs, tokenizer)

    @abstractmethod
    def read(self, values: Values) -> Iterable[str | None]:
        """Returns the fields of the record that are read, but for system, history and tools."""

    def unread(self, values: Values) -> set[str]:
        """Also of messages: messages.trainable."""
        read = {field for field in (self.system, self.history, TOOLS, *self.read(values)) if field is not None}
        whole = read | {field.partition(".")[0] for field in read}
        found = {field for field in values if field not in whole and _holds(values[field])}
        for field in read:
            held = values.get(field)
            for message in held if isinstance(held, list) else [held]:
                if isinstance(message, Mapping) and (own := self._fields(message))[0] in message:
                    found |= {f"{field}.{name}" for name in message if name not in (*own, *_BESIDE) and _holds(message[name])}
        return found

    @abstractmethod
    def runs(self, turns: Sequence[Turn], template: "ChatTemplate") -> list[list[tuple["Run", int]]]:
        """Returns the texts that the template writes, one or two, each as runs with their kind (GIVEN, LEARNED, plus OTHER)."""

    def messages_of(self, values: Values, field: str, key: str, where: str) -> list[Turn]:
        """Returns the turns in a field that holds a list of messages, without an empty system prompt."""
        found = value_of(values, field, key, where)
        if not isinstance(found, list) or not found or not all(isinstance(message, Mapping) for message in found):
            raise bad_record(f"{where}: field '{field}' holds {shown(found)}, not a list of messages. Fix the record")
        placed = [(f"{where}: message {number}", message) for number, message in enumerate(found, 1)]
        if self.template in (None, *TEMPLATES) and any(message.get(self._fields(message)[0]) == _CALL for message in found):
            placed = [(at, self._as_tools(message, at)) for at, message in placed]
        turns = [self._turn(message, at) for at, message in placed]
        return [turn for turn in turns if turn.role != "system" or turn.text.strip()]

    def after_system(self, values: Values, turns: list[Turn], where: str) -> list[Turn]:
        """Returns the turns of a chat behind the system prompt in a field of its own, where there is one and they do not bring one."""
        if self.system is None or value_of(values, self.system, "data.record.system", where) is None:
            return turns
        if turns and turns[0].role in _FIRST:
            return turns
        said = text_of(values, self.system, "data.record.system", where)
        return [Turn("system", said), *turns] if said.strip() else turns

    def _fields(self, message: Values) -> tuple[str, str]:
        """Returns the fields of a message that hold its role and its content."""
        role_field = self.role_field or ("from" if "role" not in message and "from" in message else "role")
        return role_field, self.content_field or ("value" if "content" not in message and "value" in message else "content")

    def _as_tools(self, message: Values, at: str) -> Values:
        """Returns a message of ShareGPT's chats with tools as OpenAI's format has it."""
        role_field, content_field = self._fields(message)
        if message.get(role_field) == _SEEN:
            return {**message, role_field: "tool"}
        if message.get(role_field) != _CALL:
            return message
        held = listed(message.get(content_field))
        calls = held if isinstance(held, list) else [held]
        if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
            raise bad_record(f"{at}: a {_CALL} holds {shown(held)}, not the JSON of an object with name and arguments. Fix the record")
        return {
            **message,
            role_field: ASSISTANT,
            content_field: "",
            "tool_calls": [{"type": "function", "function": call} for call in calls],
        }

    def _turn(self, message: Values, at: str) -> Turn:
        role_field, content_field = self._fields(message)
        said = text_of(message, role_field, "data.record.role_field", at)
        role = _ROLES.get(said, said)
        if role not in ROLES and self.template in (None, *TEMPLATES):
            remedy = "Fix the record, or write the role by a template of your own, data.record.template=FILE"
            raise bad_record(f"{at}: {shown(said)} is no role that models know ({', '.join(ROLES)}). {remedy}")
        also = {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}
        if role == ASSISTANT:
            also |= {name: text_of(message, name, "data.record", at) for name in THOUGHTS if message.get(name)}
        if calls := objects_of(message, "tool_calls", at):
            also["tool_calls"] = calls
            message = {**message, content_field: message.get(content_field) or ""}
        if (parts := message.get(content_field)) and isinstance(parts, list) and all(map(_is_text, parts)):
            message = {**message, content_field: "".join(part["text"] for part in parts)}
        text = text_of(message, content_field, "data.record.content_field", at)
        for name in _WEIGHTS if role == ASSISTANT else ():
            if (weight := message.get(name)) not in (0, 1, None):
                raise bad_record(f"{at}: {name} is {shown(weight)}, and a message is learned or not: 1 or 0, true or false. Fix the record")
            also |= {"weight": 0} if weight == 0 else {}
        return Turn(role, text, json.dumps(also) if also else "")

    def behind_earlier(self, values: Values, asked: list[Turn], where: str) -> list[Turn]:
        """Returns the turns of a question behind the earlier ones of `history`; its system message stays the first."""
        first = 1 if asked and asked[0].role in _FIRST else 0
        return [*asked[:first], *self._earlier(values, where), *asked[first:]]

    def _earlier(self, values: Values, where: str) -> list[Turn]:
        """Returns the turns of the pairs in the field `history`."""
        if self.history is None:
            return []
        pairs = listed(value_of(values, self.history, "data.record.history", where)) or []
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            remedy = "Fix the record, name the other fields (--help lists data.record's) to leave it out"
            raise bad_record(f"{where}: field '{self.history}' holds {shown(pairs)}, not a list of pairs of texts. {remedy}")
        said = [(role, text) for pair in pairs for role, text in zip(("user", ASSISTANT), pair, strict=True)]
        return [Turn(role, text_of({self.history: text}, self.history, "data.record.history", where)) for role, text in said]

    def asked(self, values: Values, fields: Sequence[str], key: str, where: str) -> list[Turn]:
        """Returns the turns of a question: those in one field, or the texts in several, one below the other, without empty ones."""
        parts = [self.turns_of(values, field, "user", key, where) for field in fields]
        return parts[0] if len(parts) == 1 else [Turn("user", "\n\n".join(turn.text for part in parts for turn in part if turn.text))]

    def turns_of(self, values: Values, field: str, role: str, key: str, where: str) -> list[Turn]:
        """Returns the turns in a field: one turn of this role where the field is a text, else those of its list of messages."""
        if isinstance(value_of(values, field, key, where), list):
            return self.messages_of(values, field, key, where)
        return [Turn(role, text_of(values, field, key, where))]


def _holds(value: object) -> bool:
    """Whether a field holds something; all rows of a table have the same fields."""
    return value is not None and value not in ("", [], {})


def _is_text(part: object) -> bool:
    """Whether a part of a message's content is text; OpenAI's content may be a list of parts."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def tools_of(values: Values, where: str) -> list[Turn]:
    """Returns the tools that a chat may call, as one turn to put first; [] where the field `tools` is missing or empty."""
    tools = objects_of(values, TOOLS, where)
    return [Turn(TOOLS, json.dumps(tools))] if tools else []


def objects_of(values: Values, field: str, where: str) -> list[Values]:
    """Returns the list of objects in a field; [] where there is none. The list may be a JSON text, since all rows of a dataset's column
    must have one schema."""
    found = listed(values.get(field))
    if found and not (isinstance(found, list) and all(isinstance(each, Mapping) for each in found)):
        raise bad_record(f"{where}: field '{field}' holds {shown(found)}, not a list of objects. Fix the record")
    return found or []


def _run_passages(split: Split, texts: list[list[tuple["Run", int]]], tokenizer: Tokenizer) -> Iterator[Passage]:
    """Yields one passage for each run that has tokens, with the run's kind."""
    found = [(run, kind, ids) for runs in texts for (run, kind), ids in zip(runs, _ids_of_runs(runs, tokenizer), strict=True) if len(ids)]
    for number, (run, kind, ids) in enumerate(found):
        text = "".join(part for part in run.parts if isinstance(part, str))
        starts, ends = number == 0, number == len(found) - 1
        yield Passage(split, text, [], [], starts, ends, kind, counted=kind % OTHER == LEARNED, ids=ids)


def _ids_of_runs(runs: list[tuple["Run", int]], tokenizer: Tokenizer) -> list[NDArray[np.int64]]:
    """Returns the ids of each run of one text. A token that spans several runs goes to a learned one, or else to the last of them."""
    if not runs:  # the template writes nothing
        return []
    of_part = np.array([number for number, (run, _) in enumerate(runs) for _ in run.parts], np.int64)
    ids, first, last = together(tokenizer, [part for run, _ in runs for part in run.parts])
    first, last = of_part[first], of_part[last]
    for at in np.flatnonzero(first != last):
        last[at] = next((n for n in range(first[at], last[at] + 1) if runs[n][1] % OTHER == LEARNED), last[at])
    return np.split(ids, np.searchsorted(last, np.arange(1, len(runs))))


def last_learned(runs: "Sequence[Run]", offset: int = 0) -> "list[tuple[Run, int]]":
    """Returns each run of a chat with its kind, of which the last that the template has marked is learned.  offset: 0, or OTHER."""
    last = max((number for number, run in enumerate(runs) if run.learned), default=-1)
    return [(run, offset + (LEARNED if number == last else GIVEN)) for number, run in enumerate(runs)]
