"""What a document becomes before its text is encoded: pieces of text with the special tokens around them."""

from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import NamedTuple

from lm.data.chat import ChatTemplate, Run, template_source
from lm.data.config import ChatRecord, DataConfig, PairRecord, PreferenceRecord
from lm.data.records import ASSISTANT
from lm.data.source import Document, Split, Turn
from lm.data.tokenizer import Tokenizer, pieces

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
            yield Piece(document.split, text, head, tail, number == 0)


class _Pairs:
    """[bos] source [eos], then target [eos]; what goes before a target is the start token, which is the model's."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._prefix, self._suffix = tokenizer.prefix, tokenizer.suffix

    def __call__(self, document: Document) -> Iterator[Piece]:
        source, target = document.turns
        yield Piece(document.split, source.text, self._prefix, self._suffix, True, GIVEN, counted=False)
        yield Piece(document.split, target.text, [], self._suffix, False, LEARNED)


class _Chats:
    """Runs of what is read and what is learned, by turns."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def __call__(self, document: Document) -> Iterator[Piece]:
        for number, run in enumerate(self._template.runs(document.turns)):
            yield from _run_pieces(document.split, run, number == 0, LEARNED if run.learned else GIVEN)


class _Preferences:
    """The prompt with the better answer, then the prompt with the other one; only the answers are learned."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def __call__(self, document: Document) -> Iterator[Piece]:
        *prompt, chosen, rejected = document.turns
        for offset, answer in ((0, chosen), (OTHER, rejected)):
            runs = self._template.runs([*prompt, Turn(ASSISTANT, answer.text)])
            last = max((number for number, run in enumerate(runs) if run.learned), default=-1)
            for number, run in enumerate(runs):
                kind = LEARNED if number == last else GIVEN
                yield from _run_pieces(document.split, run, number == offset == 0, kind + offset)


def _run_pieces(split: Split, run: Run, starts: bool, kind: int) -> Iterator[Piece]:
    """A piece for each text, with the special tokens before it; the last one has those at the end too."""
    head: list[int] = []
    texts: list[tuple[list[int], str]] = []
    for part in run.parts:
        if isinstance(part, int):
            head.append(part)
        else:
            texts.append((head, part))
            head = []
    texts = texts or [([], "")]
    for number, (before, text) in enumerate(texts):
        tail = head if number == len(texts) - 1 else []
        first = number == 0
        yield Piece(split, text, before, tail, starts and first, kind if first else None, counted=kind % OTHER == LEARNED)
