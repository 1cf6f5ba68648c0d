"""Functions of the standard library, separated from their docstrings by their syntax trees: a corpus of pairs present on every machine."""

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from lm.data.config import SourceConfig
from lm.data.records.base import RecordConfig
from lm.data.records.pair import PairRecord
from lm.data.sources.base import Document, Source, Split, turns_document
from lm.data.sources.stdlib import StdlibFileSource

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class StdlibDocstringsConfig(SourceConfig):
    """Functions of the standard library without their docstrings, each with its docstring: an embedded corpus of pairs."""

    kind: Literal["stdlib_docstrings"] = "stdlib_docstrings"
    val_frac: float = Field(0.05, gt=0, lt=1)
    """Part of the files whose functions are held out for validation."""

    record: RecordConfig = PairRecord()
    """Of the fields source, target, brief, which is the first paragraph of the target, head, which is the function up to and with its
    docstring, and returns, which is value or nothing; n_arguments, and does, a list of those of returns, raises and loops that it does: a
    pair, a chat, a preference or a label."""

    @property
    def records(self) -> RecordConfig | None:
        return self.record

    def open(self, cache: Path) -> Source:
        return StdlibDocstringsSource(self, cache)


class StdlibDocstringsSource(StdlibFileSource):
    """One record per function that has a docstring on lines of its own and a body besides; its file decides the split."""

    def __init__(self, cfg: StdlibDocstringsConfig, cache: Path) -> None:
        super().__init__(cfg.val_frac, cfg.identity(), cache)
        self._record = cfg.record

    def _of_file(self, text: str, where: str, split: Split) -> Iterator[Document]:
        """Leaves out a record whose last two turns are equal: a preference between equal answers, as of a one-paragraph docstring."""
        for found in functions(text):
            values = found._asdict() | {
                "brief": found.target.split("\n\n")[0],
                "returns": "value" if "returns" in found.does else "nothing",
            }
            turns = self._record.turns(values, where)
            if turns[-1].text != turns[-2].text and (document := turns_document(turns, split)):
                yield document


class Function(NamedTuple):
    """The texts of a function, dedented."""

    head: str  # the lines up to the end of the docstring
    source: str  # without the docstring
    target: str  # the docstring
    n_arguments: int  # *args and **kwargs included
    does: list[str]  # names in `_DOES`


def functions(module: str) -> Iterator[Function]:
    """Yields each function that has a docstring; nothing for a module that does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old code
            tree = ast.parse(module)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = [line + "\n" for line in module.split("\n")]  # lines as the parser counts them: a form feed ends no line
    for node in ast.walk(tree):
        if isinstance(node, _Function) and (doc := ast.get_docstring(node, clean=False)) and len(node.body) > 1:
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            if first > node.lineno and not lines[first - 1][: node.body[0].col_offset].strip() and node.body[1].lineno > last:
                head = textwrap.dedent("".join(lines[node.lineno - 1 : last]))
                source = textwrap.dedent("".join([*lines[node.lineno - 1 : first - 1], *lines[last : node.end_lineno]]))
                does = [name for name, is_so in _DOES.items() if any(map(is_so, ast.walk(node)))]
                yield Function(head, source, inspect.cleandoc(doc), _n_arguments(node.args), does)


def _returns(node: ast.AST) -> bool:
    """Whether this is a return, or a yield, of a value that is not the constant None."""
    given = node.value if isinstance(node, ast.Return | ast.Yield) else node if isinstance(node, ast.YieldFrom) else None
    return given is not None and not (isinstance(given, ast.Constant) and given.value is None)


def _n_arguments(given: ast.arguments) -> int:
    return len([*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))])


_DOES: dict[str, Callable[[ast.AST], bool]] = {
    "returns": _returns,
    "raises": lambda node: isinstance(node, ast.Raise),
    "loops": lambda node: isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.comprehension),
}
