"""Functions of the standard library and their docstrings, cut apart by their syntax trees: a corpus of pairs that is on every machine."""

import ast
import inspect
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from lm.data.config import StdlibDocstringsConfig
from lm.data.sources.base import Document, Split
from lm.data.sources.records import RecordReader
from lm.data.sources.stdlib import StdlibFileSource

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class StdlibDocstringsSource(StdlibFileSource):
    """One pair per function that has a docstring on lines of its own and a body beside it, split by the file it is in."""

    def __init__(self, cfg: StdlibDocstringsConfig, cache: Path) -> None:
        super().__init__(cfg.val_frac, {"kind": cfg.kind, "val_frac": cfg.val_frac, "record": cfg.record.tree()}, cache)
        self._reader, self._compares = RecordReader("", cfg.record), cfg.record.kind == "preference"

    def _of_file(self, text: str, where: str, split: Split) -> Iterator[Document]:
        return filter(None, (self._reader.document(record, where, split) for record in self._records(text)))

    def _records(self, module: str) -> Iterator[dict[str, str]]:
        """A preference needs a docstring that its first paragraph is only a part of."""
        for source, target in pairs(module):
            brief = target.split("\n\n")[0]
            if not self._compares or brief != target:
                yield {"source": source, "target": target, "brief": brief}


def pairs(module: str) -> Iterator[tuple[str, str]]:
    """(source without its docstring, docstring) of each function, both dedented; nothing of a module that does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes
            tree = ast.parse(module)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = [line + "\n" for line in module.split("\n")]  # as the parser counts them: a form feed ends none
    for node in ast.walk(tree):
        if isinstance(node, _Function) and (doc := ast.get_docstring(node, clean=False)) and len(node.body) > 1:
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            if first > node.lineno and not lines[first - 1][: node.body[0].col_offset].strip() and node.body[1].lineno > last:
                yield textwrap.dedent("".join([*lines[node.lineno - 1 : first - 1], *lines[last : node.end_lineno]])), inspect.cleandoc(doc)
