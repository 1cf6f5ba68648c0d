"""What a document becomes before its text is encoded: pieces of text with the special tokens around them."""

from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import NamedTuple

from lm.data.config import DataConfig
from lm.data.source import Document, Split
from lm.data.tokenizer import Tokenizer, pieces

GIVEN, LEARNED = 0, 1  # kinds of the parts of a record
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


def piece_maker(data: DataConfig, tokenizer: Tokenizer) -> MakePieces:
    """How the records of this source become pieces."""
    return _Pairs(tokenizer) if data.shape == "pair" else _Texts(tokenizer)


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
