"""What one record of a jsonl, csv, parquet or hub source says: its text, or the turns of which it consists."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm.data.config import PairRecord, RecordConfig
from lm.data.source import Document, Split, Turn, document, turns_document
from lm.errors import ConfigError

Values = Mapping[str, Any]


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
        return turns_document(pair_turns(values, self.record, where), split)


def pair_turns(values: Values, record: PairRecord, where: str) -> list[Turn]:
    """The two texts of a pair."""
    source = _text(values, record.source, "data.record.source", where)
    target = _text(values, record.target, "data.record.target", where)
    return [Turn("source", source), Turn("target", target)]


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
