"""What one record of a jsonl, csv, parquet or hub source says: its text, or the turns of which it consists."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm.data.config import ChatRecord, Chatted, PairRecord, PreferenceRecord, RecordConfig
from lm.data.sources.base import Document, Split, Turn, document, turns_document
from lm.errors import ConfigError

Values = Mapping[str, Any]
ASSISTANT, CHOSEN, REJECTED = "assistant", "chosen", "rejected"
_ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}


class BadRecord(ConfigError):
    """A broken record, which data.on_bad_record=skip leaves out."""


@dataclass(frozen=True)
class Line:
    """One line of a jsonl file and the byte where it begins."""

    data: bytes
    offset: int


@dataclass(frozen=True)
class RecordReader:
    """Makes a document of each record, by the `field` and `record` of a data config."""

    field: str
    record: RecordConfig | None

    def document(self, record: Line | Values, where: str, split: Split | float) -> Document | None:
        """None for a record of blank space; BadRecord names place, field and fault."""
        values = _parsed(record, where) if isinstance(record, Line) else record
        if self.record is None:
            return document([_text(values, self.field, "data.field", where)], split)
        return turns_document(_turns(values, self.record, where), split)


def _turns(values: Values, record: RecordConfig, where: str) -> list[Turn]:
    match record:
        case PairRecord():
            source = _text(values, record.source, "data.record.source", where)
            return [Turn("source", source), Turn("target", _text(values, record.target, "data.record.target", where))]
        case ChatRecord():
            return _chat_turns(values, record, where)
        case PreferenceRecord():
            return _preference_turns(values, record, where)


def _chat_turns(values: Values, record: ChatRecord, where: str) -> list[Turn]:
    if record.messages is not None:
        turns = _messages(values, record.messages, "data.record.messages", record, where)
    else:
        assert record.assistant is not None
        asked = [_text(values, field, "data.record.user", where) for field in record.user]
        answer = Turn(ASSISTANT, _text(values, record.assistant, "data.record.assistant", where))
        turns = [Turn("user", "\n\n".join(filter(None, asked))), answer]
    if not any(turn.role == ASSISTANT for turn in turns):
        raise _bad(f"{where}: no message is the assistant's, so there is nothing to learn. Fix the record")
    return turns


def _preference_turns(values: Values, record: PreferenceRecord, where: str) -> list[Turn]:
    """The messages of the prompt, then the two answers."""
    sides = [_answer(values, field, key, record, where) for field, key in ((record.chosen, "chosen"), (record.rejected, "rejected"))]
    prompt = [Turn("user", _text(values, record.prompt, "data.record.prompt", where))] if record.prompt is not None else sides[0][0]
    if not prompt or (record.prompt is None and sides[0][0] != sides[1][0]):
        raise _bad(f"{where}: fields '{record.chosen}' and '{record.rejected}' do not begin with the same messages. Fix the record")
    return [*prompt, Turn(CHOSEN, sides[0][1]), Turn(REJECTED, sides[1][1])]


def _answer(values: Values, field: str, key: str, record: PreferenceRecord, where: str) -> tuple[list[Turn], str]:
    """What stands before the answer, and the answer."""
    if isinstance(_found(values, field, f"data.record.{key}", where), str):
        return [], _text(values, field, f"data.record.{key}", where)
    turns = _messages(values, field, f"data.record.{key}", record, where)
    if turns[-1].role != ASSISTANT:
        raise _bad(f"{where}: field '{field}' does not end with the assistant's message. Fix the record")
    return turns[:-1], turns[-1].text


def _messages(values: Values, field: str, key: str, record: Chatted, where: str) -> list[Turn]:
    found = _found(values, field, key, where)
    if not isinstance(found, list) or not found or not all(isinstance(message, Mapping) for message in found):
        raise _bad(f"{where}: field '{field}' holds {json.dumps(found, default=str)[:40]}, not a list of messages. Fix the record")
    turns = []
    for number, message in enumerate(found, 1):
        at = f"{where}: message {number}"
        role = _text(message, record.role_field, "data.record.role_field", at)
        turns.append(Turn(_ROLES.get(role, role), _text(message, record.content_field, "data.record.content_field", at)))
    return turns


def not_utf8(where: str, offset: int) -> BadRecord:
    """The error for bytes that are no UTF-8; offset counts from the file's beginning."""
    return _bad(f"{where}: byte {offset} is not UTF-8. Convert the file to UTF-8")


def _text(values: Values, field: str, key: str, where: str) -> str:
    text = _found(values, field, key, where)
    if not isinstance(text, str):
        raise _bad(f"{where}: field '{field}' holds {json.dumps(text, default=str)[:40]}, not a string. Fix the record")
    return _utf8(text, field, where)


def _found(values: Values, field: str, key: str, where: str) -> Any:
    """The value of a field, or below objects of a dotted path."""
    if field in values:
        return values[field]
    at: Any = values
    for name in field.split("."):
        if not isinstance(at, Mapping) or name not in at:
            there = ", ".join(map(str, values)) or "none"
            raise _bad(f"{where}: field '{field}' is missing; the fields are {there}. Set {key}, fix the record")
        at = at[name]
    return at


def _utf8(text: str, field: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _bad(f"{where}: field '{field}' holds half a surrogate pair, which is no UTF-8 text. Fix the record") from None
    return text


def _parsed(line: Line, where: str) -> Values:
    try:
        values = json.loads(line.data.decode("utf-8-sig" if line.offset == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        raise not_utf8(where, line.offset + error.start) from None
    except (ValueError, RecursionError) as error:
        raise _bad(f"{where}: the line is not JSON ({error}). Fix the line") from None
    if not isinstance(values, dict):
        raise _bad(f"{where}: the line holds {json.dumps(values)[:40]}, not an object with fields. Fix the line")
    return values


def _bad(problem: str) -> BadRecord:
    return BadRecord(f"{problem}, or set data.on_bad_record=skip.")
