"""Numbers and tables as people read them."""

import json
from collections.abc import Sequence
from typing import Any

from lm.printing import one_line

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "-"})()
"""Stands where a config has no such key."""


def si(value: float | None) -> str:
    """Three significant digits and a decimal prefix: 3285504 -> '3.29 M'."""
    if value is None:
        return "-"
    for size, prefix in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.{0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2}f} {prefix}"
    return f"{value:.3g}"


def counted(n: int, noun: str) -> str:
    """1 document; 2 documents; 12,345 documents."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def sized(n_bytes: int) -> str:
    """317 bytes; 12.3 kB; 1.25 GB."""
    return counted(n_bytes, "byte") if n_bytes < 1000 else f"{si(n_bytes)}B"


def binary(n_bytes: float) -> str:
    """12.00 MiB; 1.50 GiB."""
    return f"{n_bytes / 2**30:,.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:,.2f} MiB"


def fixed(value: float | None, error: float | None = None) -> str:
    """Four decimals, with the standard error where there is one."""
    if value is None:
        return "-"
    return f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else "")


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def shown(value: Any) -> str:
    """A config value on one line, control characters escaped, at most 40 characters; '-' where the key is absent."""
    if value is ABSENT:
        return "-"
    text = json.dumps(value, ensure_ascii=False)
    text = text[1:-1] if isinstance(value, str) else text
    return text if len(text) <= 40 else text[:39] + "…"


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Left-aligned columns; the last one is free."""
    if not rows:
        return ""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(indent + "  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows)


def fitted(rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Returns a table, its head first, or where it is wider than `width` each row as a list of its cells below the first."""
    made = table(rows, "")
    if width is None or max(map(len, made.split("\n"))) <= width:
        return made
    head, *others = rows
    return "\n".join(f"{row[0]}\n{table(list(zip(head[1:], row[1:], strict=True)), '  ')}" for row in others)
