"""How a value of the command line is read: what Hydra's grammar does not take is a text, and so is all that stands for one."""

import re
import shlex
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from pydantic.fields import FieldInfo

from lm.schema import flatten, members

_CLOSE = {"[": "]", "{": "}", "(": ")"}
_MOST_NESTED = 8


def hydra(text: str) -> Override | None:
    """Returns an override as Hydra's grammar reads it; None where it does not."""
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError):  # of a number of thousands of digits, and of as many brackets
        return None


def quoted(text: str) -> str:
    """Returns what Hydra's grammar reads as this text."""
    return QuotedString(text, Quote.single).with_quotes()


def plain(text: str) -> str:
    """Returns the text itself where Hydra's grammar reads it as such, and else with quotes."""
    found = hydra(f"x={text}")
    return text if found is not None and found.value() == text else quoted(text)


def stated(text: str) -> list[str]:
    """Returns what an override speaks for: the dotted path of its key, or those of the values of a dict."""
    key, _, raw = text.partition("=")
    path = key.lstrip("~+").replace("/", ".")
    found = hydra(f"x={readable(raw)}") if raw.lstrip().startswith("{") else None
    value = found.value() if found is not None else None
    return list(flatten(value, f"{path}.")) if isinstance(value, dict) and value else [path]


def in_shell(text: str) -> str:
    """Returns what a shell reads as this argument."""
    return shlex.quote(text) if re.search(r'["$`\\!]', text) else f'"{text}"'


def readable(value: str, depth: int = 0) -> str:
    """Returns the value with quotes around those parts of lists and dicts, or else all of it, that Hydra's grammar does not take."""
    if hydra(f"x={value}") is not None:
        return value
    inside, brackets = value.strip()[1:-1], value.strip()[:1] + value.strip()[-1:]
    if brackets not in ("[]", "{}") or not inside or depth == _MOST_NESTED:
        return quoted(value)
    items = [piece.partition(":") if brackets == "{}" else ("", "", piece) for piece in pieces(inside)]
    if brackets == "{}" and not all(colon for _, colon, _ in items):  # no dict, but a name such as {0}
        return quoted(value)
    return f"{brackets[0]}{','.join(key + colon + readable(each.strip(), depth + 1) for key, colon, each in items)}{brackets[1]}"


def alternatives(value: str) -> list[str]:
    """Returns the values of a sweep, `a,b` or `choice(a,b)`; one where it is none."""
    choice = re.fullmatch(r"\s*choice\((.*)\)\s*", value, re.DOTALL)
    return pieces(choice.group(1)) if choice else pieces(value)


def pieces(text: str) -> list[str]:
    """Returns what stands between the commas outside of quotes and brackets; all of it where something between them is blank."""
    found = [text[start:end].strip() for start, end in _spans(text)]
    return found if len(found) > 1 and all(found) else [text]


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Where brackets and quotes do not match, they are letters like others."""
    commas: list[int] = []
    expected: list[str] = []
    quote, before = "", ","
    for at, char in enumerate(text):
        if quote:
            escapes = len(text[:at]) - len(text[:at].rstrip("\\"))
            quote = "" if char == quote and escapes % 2 == 0 else quote
        elif char in "'\"" and (before in ",[{(" or (before == ":" and expected)):
            quote = char
        elif char in _CLOSE:
            expected.append(_CLOSE[char])
        elif expected and char == expected[-1]:
            expected.pop()
        elif char == "," and not expected:
            commas.append(at)
        before = before if char.isspace() else char
    if quote or expected:
        commas = [at for at, char in enumerate(text) if char == ","]
    yield from zip([0, *(at + 1 for at in commas)], [*commas, len(text)], strict=True)


def as_text(field: FieldInfo, raw: str, value: Any) -> Any:
    """Returns a value as it was typed, where the field holds texts; quotes around all of it or of an element are taken off.

    value: as Hydra reads it, for all other fields.
    """
    options = members(field.annotation)
    lists = any(get_origin(option) is list and str in members(get_args(option)[0]) for option in options)
    inside = raw.strip()[1:-1]
    if lists and raw.strip()[:1] + raw.strip()[-1:] == "[]":
        return [_unquoted(piece) for piece in pieces(inside)] if inside.strip() else []
    if str not in options or (raw.strip() == "null" and type(None) in options):
        return value
    return _unquoted(raw)


def _unquoted(text: str) -> str:
    if text.strip()[:1] not in ("'", '"') or (found := hydra(f"x={text}")) is None:
        return text
    return str(found.value())
