"""Reading the fields of one record, with errors that say which field of which record is wrong."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lm.data.records.base import Values
from lm.errors import ConfigError

_MOST_CHARS, _MOST_NAMES = 60, 20


class BadRecord(ConfigError):
    """A broken record, which data.on_bad_record=skip leaves out."""


@dataclass(frozen=True)
class Line:
    """One line of a jsonl file and the byte where it begins."""

    data: bytes
    offset: int


def names(values: Values) -> str:
    """Returns the names of a record's fields for an error message, shortened where they are long or many."""
    told = [name if len(name) <= _MOST_CHARS else f"{name[:_MOST_CHARS]}..." for name in map(str, values)]
    return ", ".join([*told[:_MOST_NAMES], *(["..."] if len(told) > _MOST_NAMES else [])]) or "(none)"


def text_of(values: Values, field: str, key: str, where: str) -> str:
    """Returns the text in a field.  key: the option that names the field."""
    text = value_of(values, field, key, where)
    if not isinstance(text, str):
        raise bad_record(f"{where}: field '{field}' holds {shown(text)}, not a string. Fix the record")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_record(f"{where}: field '{field}' holds half a surrogate pair, which is no UTF-8 text. Fix the record") from None
    return text


def value_of(values: Values, field: str, key: str, where: str) -> Any:
    """Returns the value of a field, or at a dotted path into nested objects."""
    if field in values:
        return values[field]
    at: Any = values
    for name in field.split("."):
        if not isinstance(at, Mapping) or name not in at:
            raise bad_record(f"{where}: field '{field}' is missing; the fields are {names(values)}. Set {key}, fix the record")
        at = at[name]
    return at


def parsed(line: Line, where: str) -> Values:
    """Returns the object in a line of JSON."""
    try:
        values = json.loads(line.data.decode("utf-8-sig" if line.offset == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        raise not_utf8(where, line.offset + error.start) from None
    except (ValueError, RecursionError) as error:
        raise bad_record(f"{where}: the line is not JSON ({error}). Fix the line") from None
    if not isinstance(values, dict):
        raise bad_record(f"{where}: the line holds {shown(values)}, not an object with fields. Fix the line")
    return values


def listed(value: Any) -> Any:
    """Returns the value in a JSON text, as which tables hold lists; any other value as it is."""
    if isinstance(value, str) and value:
        with suppress(ValueError):
            return json.loads(value)
    return value


def truth(value: Any) -> bool | None:
    """Returns what true, false, 1 or 0 say, also as the texts that a csv file has of them; None for any other value."""
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    return bool(value) if value in (0, 1) else None


def shown(value: Any) -> str:
    """Returns the beginning of a value, for an error message."""
    return json.dumps(value, default=str)[:40]


def not_utf8(where: str, offset: int) -> BadRecord:
    """Returns the error for bytes that are no UTF-8.  offset: in bytes from the file's beginning."""
    return bad_record(f"{where}: byte {offset} is not UTF-8. Convert the file to UTF-8")


def table_not_utf8(where: str, offset: int) -> ConfigError:
    """Returns the same for a file whose records are no lines, so that none of them can be left out."""
    return ConfigError(f"{where}: byte {offset} is not UTF-8. Convert the file to UTF-8, or leave it out.")


def bad_record(problem: str) -> BadRecord:
    """Returns the error for a broken record.  problem: its last sentence is a remedy, to which skipping is added."""
    return BadRecord(f"{problem}, or set data.on_bad_record=skip.")
