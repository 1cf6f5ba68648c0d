"""Chat templates are programs that come with a model: they run in jinja's sandbox, without what takes memory or time beyond all bounds."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lm.errors import ConfigError

_MAX_SOURCE = 1 << 16  # characters
_MAX_TEXT = 1 << 24
_MAX_TURNS = 100_000  # of all ranges in one rendering
_MAX_INDENT = 16
_UNSAFE_METHODS = {"format", "format_map", "center", "ljust", "rjust", "zfill", "expandtabs", "translate"}  # widths of any size
_UNSAFE_FILTERS = ("format", "center", "batch", "slice", "wordwrap", "pprint")

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # around what {% generation %} holds; no text may hold these
Messages = Sequence[dict[str, str]]


def compiled(source: str, where: str) -> Callable[[Messages, dict[str, Any]], str]:
    """The template as a function of messages and further names. Raises ConfigError, then and when it runs.

    `{% generation %}` blocks come out between OPEN and CLOSE.
    """
    if len(source) > _MAX_SOURCE:
        raise ConfigError(f"{where}: a chat template of {len(source):,} characters is over {_MAX_SOURCE:,}. Use a shorter one.")
    try:
        template = _Environment().from_string(source)
    except TemplateError as error:
        raise ConfigError(f"{where}: the chat template cannot be read ({error}). Mend it.") from None

    def render(messages: Messages, names: dict[str, Any]) -> str:
        budget = _Budget()
        text, size = [], 0
        try:
            for part in template.generate(messages=messages, range=budget.range, raise_exception=_refuse, **names):
                text.append(part)
                size += len(part)
                if size > _MAX_TEXT:
                    raise OverflowError(f"it writes more than {_MAX_TEXT:,} characters")
        except (TemplateError, OverflowError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{where}: the chat template fails ({error}). Mend it, or the messages.") from None
        return "".join(text)

    return render


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, as transformers reads it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


class _Environment(ImmutableSandboxedEnvironment):
    """As transformers sets it up, with fewer methods and filters, and a bound on what `*` and `**` make."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        for name in _UNSAFE_FILTERS:
            del self.filters[name]
        self.filters |= {"indent": _indent, "tojson": _json}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNSAFE_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """jinja would run str.format in a sandbox of its own; here it is refused like the others."""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if isinstance(side, str | list | tuple) else side for side in (left, right)]
        if operator == "**" and not all(isinstance(side, int | float) and abs(side) <= 64 for side in sizes):
            raise OverflowError("powers are bounded to 64 ** 64")
        if operator == "*" and any(not isinstance(side, int | float) for side in (left, right)) and sizes[0] * sizes[1] > _MAX_SOURCE:
            raise OverflowError(f"a product of more than {_MAX_SOURCE:,} characters")
        return super().call_binop(context, operator, left, right)


class _Budget:
    """Turns that all ranges of one rendering may take."""

    def __init__(self) -> None:
        self._left = _MAX_TURNS

    def range(self, *args: int) -> range:
        found = range(*args)
        self._left -= len(found)
        if self._left < 0:
            raise OverflowError(f"its ranges take more than {_MAX_TURNS:,} turns")
        return found


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    return do_indent(text, _narrow(width), first, blank)


def _json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Plain JSON, where jinja's own escapes for HTML."""
    narrow = None if indent is None else _narrow(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=narrow, separators=separators, sort_keys=sort_keys)


def _narrow(width: Any) -> Any:
    if (width if isinstance(width, int) else len(width)) > _MAX_INDENT:
        raise OverflowError(f"an indentation of more than {_MAX_INDENT}")
    return width


def _refuse(message: str) -> None:
    raise TemplateError(message)
