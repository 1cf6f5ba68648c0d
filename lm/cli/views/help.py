"""Help texts, wrapped to 80 columns: usages, and a paragraph for each option."""

import re
from collections.abc import Iterable, Iterator
from inspect import cleandoc
from itertools import chain, groupby, takewhile
from textwrap import wrap

from pydantic.fields import FieldInfo

from lm.cli.views.text import default_text, sentence, type_text
from lm.schema import Config

WIDTH = 80
Entry = tuple[str, str, str]  # name, what it may be and is, what it means


def usage(cls: type[Config]) -> str:
    """Returns the wrapped docstring. Rows of a table are wrapped one by one, indented to their last column."""
    return "\n".join(_folded(cleandoc(cls.__doc__ or "").splitlines()))


def listing(cls: type[Config]) -> str:
    """Returns an entry for each field, required fields first; for a verb's own keys."""
    found = sorted(cls.model_fields.items(), key=lambda item: not item[1].is_required())
    return entries(_entry(name.rstrip("_"), field) for name, field in found)


def entries(rows: Iterable[Entry]) -> str:
    """Returns for each row its name and value on one line, and its meaning below."""
    return "\n".join(
        line for name, value, what in rows for line in [*_hung(f"  {name}  ", value, 6), *(_hung("      ", what, 6) if what else [])]
    )


def _entry(name: str, field: FieldInfo) -> Entry:
    return name, f"{type_text(field)} [{default_text(field)}]", sentence(field)


def _folded(lines: list[str]) -> Iterator[str]:
    head = list(takewhile(bool, lines))
    yield from _hung("", " ".join(" ".join(head).split()), 4)
    for is_row, group in groupby(lines[len(head) :], key=lambda line: not line or bool(re.search(r"^ |\S {2,}\S", line))):
        found = list(group)
        yield from chain(*map(_row, found)) if is_row else _hung("", " ".join(found), 0)


def _row(line: str) -> list[str]:
    """Returns the wrapped lines of a table's row. The row keeps its first column, unless that leaves too little space for the next."""
    gap = re.match(r"(.*\S {2,}| *)(?=\S)", line)
    head = gap.group(1) if gap else ""
    return _hung(head, line[len(head) :], len(head)) if len(head) < WIDTH // 2 else _hung("  ", "  ".join(re.split(" {2,}", line)), 6)


def _hung(head: str, text: str, indent: int) -> list[str]:
    """Returns the wrapped lines of a text after its head; further lines are indented."""
    found = wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * indent, break_on_hyphens=False)
    return found or [head.rstrip()]
