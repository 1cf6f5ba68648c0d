"""The records of a .json file, which is one list, read piece by piece."""

import json
import re
from collections.abc import Iterator
from typing import Any

from lm.errors import ConfigError

_BLANK = re.compile("[ \t\n\r]*")
_MOST_CHARS = 1 << 26  # of one record: bounds the search for a missing closing quote in a huge file


def elements(chunks: Iterator[str], where: str) -> Iterator[Any]:
    """Yields the elements of a JSON list from its text in chunks.  Raises ConfigError with the record's number where the text is none."""
    decode = json.JSONDecoder().raw_decode
    held, number, marks, is_value, fault = "", 1, "[", False, "it ends before its list does"
    for chunk in chunks:
        held, at = held + chunk, 0
        while (at := _past_blanks(held, at)) < len(held):
            if held[at] in marks:
                marks, is_value = {"[": ("]", True), ",": ("", True), "]": ("", False)}[held[at]]
                at += 1
            elif not is_value:
                raise _broken(where, number, f"there is {held[at : at + 20]!r} where {' or '.join(marks) or 'its end'} must be")
            else:
                try:
                    value, end = decode(held, at)
                except (ValueError, RecursionError) as error:
                    fault = str(error)
                    if isinstance(error, RecursionError) or len(held) - at > _MOST_CHARS:
                        raise _broken(where, number, fault) from None
                    break  # the rest is in the next chunk
                yield value
                at, number, marks, is_value = end, number + 1, ",]", False
        held = held[at:]
    if marks or is_value or held.strip():
        raise _broken(where, number, fault)


def _past_blanks(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found is not None else at


def _broken(where: str, number: int, fault: str) -> ConfigError:
    remedy = "Fix the file, or name it .jsonl if it has a record a line"
    return ConfigError(f"{where} record {number}: the file is no JSON list of records ({fault}). {remedy}.")
