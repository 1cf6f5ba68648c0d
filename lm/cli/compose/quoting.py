"""How values of the command line are read: a value that Hydra's grammar does not accept is a text, as is every value of a text field."""

import re
import shlex
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from pydantic.fields import FieldInfo

from lm.schema import flatten, members

_CLOSE = {"[": "]", "{": "}", "(": ")"}
_MOST_NESTED = 8


@lru_cache(maxsize=1024)  # the jobs of a sweep and of a study share most of their overrides
def hydra(text: str) -> Override | None:
    """Returns an override parsed by Hydra's grammar, whose value, unless it is a sweep, is made anew at each call; None where the grammar
    does not accept it."""
    try:
        return _parser().parse_override(text)
    except (HydraException, ValueError, RecursionError):  # of a number of thousands of digits, and of as many brackets
        return None


@cache
def _parser() -> OverridesParser:
    """Returns Hydra's parser, which looks at the signatures of its functions when it is made, longer than at an override."""
    return OverridesParser.create()


def quoted(text: str) -> str:
    """Returns the text quoted, so that Hydra's grammar reads it as this text."""
    return QuotedString(text, Quote.single).with_quotes()


def plain(text: str) -> str:
    """Returns the text itself where Hydra's grammar reads it as this text; else with quotes."""
    found = hydra(f"x={text}")
    return text if found is not None and found.value() == text else quoted(text)


def path_of(text: str) -> str:
    """Returns the dotted path of an override's key or group: 'model.ffn' of model/ffn=geglu, and of ~model.ffn."""
    return text.partition("=")[0].lstrip("~+").replace("/", ".")


def stated(text: str) -> list[str]:
    """Returns the dotted paths that an override sets: that of its key, or those of all values of a dict."""
    path, raw = path_of(text), text.partition("=")[2]
    found = hydra(f"x={readable(raw)}") if raw.lstrip().startswith("{") else None
    value = found.value() if found is not None else None
    return list(flatten(value, f"{path}.")) if isinstance(value, dict) and value else [path]


def in_shell(text: str) -> str:
    """Returns the text quoted, so that a shell reads it as this argument."""
    return shlex.quote(text) if re.search(r'["$`\\!]', text) else f'"{text}"'


def readable(value: str, depth: int = 0) -> str:
    """Returns the value with quotes around those parts of lists and dicts that Hydra's grammar does not accept, or around all of it, and
    without those around the keys of dicts."""
    if hydra(f"x={value}") is not None:
        return value
    inside, brackets = value.strip()[1:-1], value.strip()[:1] + value.strip()[-1:]
    if brackets not in ("[]", "{}") or not inside or depth == _MOST_NESTED:
        return quoted(value)
    items = [piece.partition(":") if brackets == "{}" else ("", "", piece) for piece in pieces(inside)]
    if brackets == "{}" and not all(colon for _, colon, _ in items):  # no dict, but a name such as {0}
        return quoted(value)
    return f"{brackets[0]}{','.join(_bare(key) + colon + readable(each.strip(), depth + 1) for key, colon, each in items)}{brackets[1]}"


def _bare(key: str) -> str:
    """Returns a dict's key without the quotes of Python or JSON around it."""
    return re.sub(r"""^\s*(['"])([\w./-]+)\1\s*$""", r"\2", key)


def alternatives(value: str) -> list[str]:
    """Returns the values of a sweep, `a,b` or `choice(a,b)`; where it is no sweep, the value alone."""
    choice = re.fullmatch(r"\s*choice\((.*)\)\s*", value, re.DOTALL)
    return pieces(choice.group(1)) if choice else pieces(value)


def pieces(text: str) -> list[str]:
    """Returns the pieces between commas outside of quotes and brackets; the whole text where a piece would be blank."""
    found = [text[start:end].strip() for start, end in _spans(text)]
    return found if len(found) > 1 and all(found) else [text]


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of the pieces between commas. Brackets and quotes without a match are ordinary letters."""
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
    """Returns the value for a field: for fields of texts as typed, with quotes around it or around list elements removed; else `value`.

    raw: as typed.  value: as read by Hydra.
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
