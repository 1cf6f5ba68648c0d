"""The rows of a csv or tsv file, read piece by piece."""

import csv
import io
import sys
from collections.abc import Iterator

from lm.errors import ConfigError

_END = "\0end of the file\0"  # a line behind the last one: a row of its own, unless a quoted field is still open


def rows(chunks: Iterator[str], where: str, tabs: bool = False) -> Iterator[dict[str, str]]:
    """Yields the rows of a csv file from its text in chunks, without blank lines. Values stay as they are written: 'NA', '' and '12' are
    strings, and those that a row lacks at its end are ''. Of columns with one name the first counts.

    tabs: tabs divide the fields, and a quote that begins a field must end it, since some programs write none around a field.  Raises
    ConfigError with the line of a row with more fields than the header, or where a quoted field has no end.
    """
    csv.field_size_limit(sys.maxsize)  # the library's limit is 131,072 characters
    reader = csv.reader(_lines(chunks), delimiter="\t" if tabs else ",", strict=tabs)
    columns: dict[str, int] = {}
    row: list[str] = []
    n = 0
    try:
        for row in reader:
            if row in ([], [_END]):
                continue
            if not columns:
                columns, n = {name: row.index(name) for name in row}, len(row)
                continue
            if any(row[n:]):  # a comma at the end of a row is no field
                raise _broken(where, f"line {reader.line_num} has {len(row)} fields, and the header {n}")
            row += [""] * (n - len(row))
            yield {name: row[at] for name, at in columns.items()}
    except csv.Error as error:
        fault = "a quote begins a field and does not end it" if tabs else error
        raise _broken(where, f"line {reader.line_num}: {fault}") from None
    if row != [_END]:
        raise _broken(where, "a quoted field has no end")


def _lines(chunks: Iterator[str]) -> Iterator[str]:
    """Yields the lines of a text with their ends, and then _END."""
    held = ""
    for chunk in chunks:
        *whole, held = io.StringIO(held + chunk, newline="") if held + chunk else [""]  # the last one may go on
        yield from whole
    yield held
    yield _END


def _broken(where: str, fault: str) -> ConfigError:
    return ConfigError(f"{where}: cannot be read ({fault}). Fix the file or leave it out.")
