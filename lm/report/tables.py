"""One table in formats for terminals, papers and programs. Names come from folders and configs, so they are always escaped."""

import csv
import html
import io
import json
import re
from collections.abc import Callable, Sequence
from itertools import chain

from lm.printing import one_line
from lm.report.collect import Comparison, Row
from lm.schema import Tree
from lm.units import duration, fixed, shown, si, table

MOST_CHARS = 120  # longest line of a table that has the differing keys
Cells = list[list[str]]  # rows of equal length, titles first


def text(comparison: Comparison, notes: Sequence[str]) -> str:
    """Returns tables with columns aligned by spaces, then a line for each note. A table of keys that is too wide goes on below."""
    made, *keys = _blocks(comparison)
    pieces = [made, *chain.from_iterable(map(_narrowed, keys))]
    return "\n\n".join([*map(_aligned, pieces), "\n".join(map(one_line, notes))]).rstrip()


def markdown(comparison: Comparison, notes: Sequence[str]) -> str:
    """Returns tables in GitHub's Markdown, and a list of notes."""
    blocks = [in_pipes([list(map(in_markdown, cells)) for cells in each]) for each in _blocks(comparison)]
    return "\n\n".join(filter(None, [*blocks, "\n".join(f"- {in_markdown(note)}" for note in notes)])) + "\n"


def latex(comparison: Comparison, notes: Sequence[str]) -> str:
    """Returns a `tabular` for each table, which needs no package, and the notes as comments."""
    blocks = []
    for each in _blocks(comparison):
        first, *rows = [" & ".join(map(_in_latex, cells)) + r" \\" for cells in each]
        lines = [rf"\begin{{tabular}}{{{'l' * len(each[0])}}}", r"\hline", first, r"\hline", *rows, r"\hline", r"\end{tabular}"]
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, *(f"% {one_line(note)}" for note in notes)]) + "\n"


def comma_separated(comparison: Comparison, notes: Sequence[str]) -> str:
    """Returns CSV by RFC 4180, with numbers in full; an apostrophe goes before cells that a spreadsheet would take for formulas."""
    records = [_record(row, comparison) for row in comparison.rows]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([[*records[0]], *([_in_csv(value) for value in record.values()] for record in records)])
    return file.getvalue()


def as_json(comparison: Comparison, notes: Sequence[str]) -> str:
    """Returns JSON: {"metric", "rows", "notes"}, with numbers in full."""
    rows = [_record(row, comparison) for row in comparison.rows]
    return json.dumps({"metric": comparison.metric, "rows": rows, "notes": list(notes)}, indent=1, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Comparison, Sequence[str]], str]] = {
    "text": text,
    "md": markdown,
    "tex": latex,
    "csv": comma_separated,
    "json": as_json,
}


def _blocks(comparison: Comparison) -> list[Cells]:
    """Returns one table with a column per differing key, or, where that is too wide, a second table for the keys, as rows or columns."""
    rows = comparison.rows
    cells = [_cells(row, comparison) for row in rows]
    made = [list(cells[0]), *(list(row.values()) for row in cells)]
    extras = [comparison.keys, *(comparison.changes(row) for row in rows)]
    joined = [[*row, *extra] for row, extra in zip(made, extras, strict=True)]
    if _width(joined) <= MOST_CHARS or not comparison.keys:
        return [joined]
    by_run = [["run", *extras[0]], *([row.name, *extra] for row, extra in zip(rows, extras[1:], strict=True))]
    return [made, min([list(column) for column in zip(*by_run, strict=True)], by_run, key=_width)]


def _narrowed(cells: Cells) -> list[Cells]:
    """Returns the table in pieces that each begin with its first column, none wider than MOST_CHARS where columns allow it."""
    first, *columns = zip(*cells, strict=True)
    pieces = [[first]]
    for column in columns:
        if len(pieces[-1]) > 1 and _width([*zip(*pieces[-1], column, strict=True)]) > MOST_CHARS:
            pieces.append([first])
        pieces[-1].append(column)
    return [[list(row) for row in zip(*piece, strict=True)] for piece in pieces]


def _width(cells: Sequence[Sequence[str]]) -> int:
    """Returns the length of a line of the table as text."""
    return sum(2 + max(map(len, column)) for column in zip(*cells, strict=True)) - 2


def _cells(row: Row, comparison: Comparison) -> dict[str, str]:
    """Returns a row's cells by column; there is a column for seeds where some row has several."""
    found = {
        "run": row.name,
        "parameters": si(row.mean("parameters")),
        "FLOPs/token": si(row.mean("flops_per_token")),
        "tokens": si(row.mean("tokens")),
        comparison.title: fixed(row.mean(comparison.metric), row.error(comparison.metric)),
        "difference": comparison.difference(row),
        **{name: fixed(row.mean(key), row.error(key)) for name, key in comparison.told.items()},
        "tokens/s": si(row.mean("tokens_per_second")),
        "wall time": duration(row.mean("train_s")),
    }
    return found | ({"seeds": " ".join(row.seeds)} if comparison.repeated else {})


def _record(row: Row, comparison: Comparison) -> Tree:
    numbers = ("parameters", "flops_per_token", "tokens", comparison.metric, *comparison.told.values(), "tokens_per_second", "train_s")
    return {
        "run": row.name,
        "seeds": " ".join(row.seeds),
        **{key: row.mean(key) for key in numbers},
        "standard_error": row.error(comparison.metric),
        "baseline": row is comparison.baseline,
        **comparison.measured(row),
        **{key: row.values.get(key) for key in comparison.keys},
    }


def in_pipes(cells: Sequence[Sequence[str]]) -> str:
    """Returns a table in GitHub's Markdown, titles first; its cells are escaped already."""
    first, *rows = cells
    return "\n".join(f"| {' | '.join(each)} |" for each in [first, ["---"] * len(first), *rows])


def _aligned(cells: Cells) -> str:
    dashes = ["-" * max(map(len, column)) for column in zip(*(map(one_line, row) for row in cells), strict=True)]
    first, *rows = [[one_line(cell) for cell in row] for row in cells]
    return table([first, dashes, *rows], indent="")


def in_markdown(cell: str) -> str:
    """Returns a cell with HTML escaped, and all characters that would begin emphasis, code, a link or another cell."""
    return re.sub(r"([\\`*\[\]|~]|(?<![^\W_])_)", r"\\\1", html.escape(one_line(cell), quote=False))


_LATEX = {char: f"\\{char}" for char in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "±": r"$\pm$", "…": r"\ldots{}",
}  # fmt: skip


def _in_latex(cell: str) -> str:
    return "".join(_LATEX.get(char, char) for char in one_line(cell))


def _in_csv(value: object) -> object:
    if isinstance(value, list | dict | bool):
        value = shown(value)
    if isinstance(value, str):
        value = one_line(value)
        return f"'{value}" if value.startswith(("=", "+", "-", "@")) and not re.match(r"[+-][\d.]", value) else value
    return value
