"""The process that runs one chat template; sandbox.py starts it as a program. It reads and writes one JSON value per line."""

import json
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MEMORY = 192 << 20  # bytes of address space, including Python's own
_SECONDS = 1.0  # CPU time of one rendering
_MAX_TEXT = 1 << 24

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # around the text of {% generation %}; no other text may contain these


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, as transformers reads it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


def _template(source: str) -> Template:
    """Returns the template, in an environment set up as transformers does."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(source)


def _rendered(template: Template, names: dict[str, Any]) -> str:
    text = template.render(names)
    if len(text) > _MAX_TEXT:
        raise OverflowError(f"it writes more than {_MAX_TEXT:,} characters")
    return text


def _json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Returns plain JSON; jinja's own `tojson` escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    """Returns the date and time here, which templates of some models write into their system message."""
    return datetime.now().strftime(form)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _answer(work: Callable[..., Any], *args: Any) -> None:
    """Prints the result of `work`, or its error, as one line. If it takes too long, the system kills the process, and no line comes."""
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        line = json.dumps({"result": work(*args)})
    except MemoryError:
        line = json.dumps({"error": f"it takes more than {_MEMORY >> 20} MiB of memory"})
    except Exception as error:
        line = json.dumps({"error": str(error)[:500] or type(error).__name__})
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(line, flush=True)


def main() -> None:
    """Reads the template's source from the first line, and variables to render it with from each further line, until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; this process ends when the one it renders for closes the pipe
    with suppress(ValueError, OSError):  # a system without this limit, such as macOS
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    found: list[Template] = []

    def render(names: dict[str, Any]) -> str:
        return _rendered(found[0], names)

    def read(source: str) -> None:
        found.append(_template(source))

    for count, line in enumerate(sys.stdin):
        _answer(render if count else read, json.loads(line))


if __name__ == "__main__":
    main()
