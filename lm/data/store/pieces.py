"""What a document becomes before its text is encoded: pieces of text with the special tokens around them."""

from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import NamedTuple

from lm.data.config import ChatRecord, DataConfig, PairRecord, PreferenceRecord
from lm.data.sources.base import Document, Split, Turn
from lm.data.sources.records import ASSISTANT
from lm.data.tokenizer.chat import ChatTemplate, Run, template_source
from lm.data.tokenizer.tokenizer import Tokenizer, pieces

GIVEN, LEARNED = 0, 1  # kinds of the parts of a record; of the second of two answers OTHER more
OTHER = 2
MakePieces = Callable[[Document], Iterator["Piece"]]


class Piece(NamedTuple):
    """Some text of one document, and the ids before and after it."""

    split: Split
    text: str
    head: list[int]
    tail: list[int]
    starts: bool  # a document
    ends: bool
    part: int | None = None  # the kind of the part that starts here
    counted: bool = True  # its bytes are those that a model is measured by


def piece_maker(data: DataConfig, tokenizer: Tokenizer) -> tuple[MakePieces, str | None]:
    """How the records of this source become pieces, and the chat template that it takes."""
    match data.records:
        case None:
            return _Texts(tokenizer), None
        case PairRecord():
            return _Pairs(tokenizer), None
        case ChatRecord() | PreferenceRecord() as record:
            source, where = template_source(record, tokenizer)
            template = ChatTemplate(source, where, tokenizer)
            return (_Chats(template) if isinstance(record, ChatRecord) else _Preferences(template)), source


class _Texts:
    """[bos] text [eos], in parts that can be encoded at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._prefix, self._suffix = tokenizer.prefix, tokenizer.suffix

    def __call__(self, document: Document) -> Iterator[Piece]:
        for number, (text, after) in enumerate(pairwise(chain(pieces(document.chunks), [""]))):
            head, tail = self._prefix if number == 0 else [], [] if after else self._suffix
            yield Piece(document.split, text, head, tail, number == 0, not after)


class _Pairs:
    """[bos] source [eos], then target [eos]; what goes before a target is the start token, which is the model's."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._prefix, self._suffix = tokenizer.prefix, tokenizer.suffix

    def __call__(self, document: Document) -> Iterator[Piece]:
        source, target = document.turns
        yield Piece(document.split, source.text, self._prefix, self._suffix, True, False, GIVEN, counted=False)
        yield Piece(document.split, target.text, [], self._suffix, False, True, LEARNED)


class _Chats:
    """Runs of what is read and what is learned, by turns."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def __call__(self, document: Document) -> Iterator[Piece]:
        runs = self._template.runs(document.turns)
        return _run_pieces(document.split, [(run, LEARNED if run.learned else GIVEN) for run in runs])


class _Preferences:
    """The prompt with the better answer, then the prompt with the other one; only the answers are learned."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def __call__(self, document: Document) -> Iterator[Piece]:
        *prompt, chosen, rejected = document.turns
        found: list[tuple[Run, int]] = []
        for offset, answer in ((0, chosen), (OTHER, rejected)):
            runs = self._template.runs([*prompt, Turn(ASSISTANT, answer.text)])
            last = max((number for number, run in enumerate(runs) if run.learned), default=-1)
            found += [(run, offset + (LEARNED if number == last else GIVEN)) for number, run in enumerate(runs)]
        return _run_pieces(document.split, found)


def _run_pieces(split: Split, runs: list[tuple[Run, int]]) -> Iterator[Piece]:
    """A piece for each text of each run, which is of the given kind, with the special tokens before it; the last has those behind too."""
    for number, (run, kind) in enumerate(runs):
        texts, tail = _with_heads(run)
        for at, (head, text) in enumerate(texts):
            first, last = at == 0, at == len(texts) - 1
            starts, ends = first and number == 0, last and number == len(runs) - 1
            part = kind if first else None
            yield Piece(split, text, head, tail if last else [], starts, ends, part, counted=kind % OTHER == LEARNED)


def _with_heads(run: Run) -> tuple[list[tuple[list[int], str]], list[int]]:
    """Each text with the special tokens before it, at least one; and those behind the last."""
    head: list[int] = []
    texts: list[tuple[list[int], str]] = []
    for part in run.parts:
        if isinstance(part, int):
            head.append(part)
        else:
            texts.append((head, part))
            head = []
    return texts or [([], "")], head
