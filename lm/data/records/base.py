"""What a record is, where it is no plain text: how its turns are read, and what they become before they are encoded."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from lm.data.sources.base import Document, Split, Turn
from lm.data.tokenizer.tokenizer import Tokenizer, split_text
from lm.schema import Slot

GIVEN, LEARNED = 0, 1  # kinds of the parts of a record; of the second of two answers OTHER more
OTHER = 2
Values = Mapping[str, Any]


class Passage(NamedTuple):
    """Some text of one document, and the ids before and after it."""

    split: Split
    text: str
    head: list[int]
    tail: list[int]
    starts: bool  # a document
    ends: bool
    part: int | None = None  # the kind of the part that starts here
    counted: bool = True  # its bytes are those that a model is measured by
    ids: NDArray[np.int64] | None = None  # of the text, where it is encoded already


class RecordConfig(Slot):
    """What a record is, where it is no plain text."""

    @abstractmethod
    def turns(self, values: Values, where: str) -> list[Turn]:
        """Returns who says what in the record of these fields; BadRecord names place, field and fault."""

    def recognised(self, values: Values, where: str) -> tuple[Self, str]:
        """Returns this, with fields that nobody named told by those of a record, and the name of its form; '' where all are named."""
        return self, ""

    @abstractmethod
    def passages(self, documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Passage]:
        """Returns what the turns of each document become."""

    def specials(self) -> tuple[str, ...]:
        """Returns special tokens that its passages hold, for a tokenizer made here."""
        return ()

    def named_template(self) -> str | None:
        """Returns the name or path of that template, where one was given."""
        return None

    def chat_template(self, tokenizer: Tokenizer) -> str | None:
        """Returns the source of the template that writes its turns; None where none does."""
        return None


def text_passages(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Passage]:
    """[bos] text [eos] of documents that are one text each, in parts that can be encoded at once."""
    for document in documents:
        for number, (text, after) in enumerate(pairwise(chain(split_text(document.chunks), [""]))):
            head, tail = tokenizer.prefix if number == 0 else [], [] if after else tokenizer.suffix
            yield Passage(document.split, text, head, tail, number == 0, not after)
