"""Records that are no plain texts: how their turns are read, and the passages that turns become before they are encoded."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from lm.data.sources.base import Document, Split, Turn
from lm.data.tokenizer.tokenizer import Tokenizer, split_text
from lm.schema import Slot

GIVEN, LEARNED = 0, 1  # kinds of a record's parts: read only, or learned; plus OTHER on the side of the second of two answers
OTHER = 2
Values = Mapping[str, Any]


class Passage(NamedTuple):
    """A piece of one document's text, and the ids before and after it."""

    split: Split
    text: str
    head: list[int]
    tail: list[int]
    starts: bool  # the passage begins a document
    ends: bool  # the passage ends a document
    part: int | None = None  # the kind of the part that starts here
    counted: bool = True  # its bytes count in bits per byte
    ids: NDArray[np.int64] | None = None  # of the text, where it is encoded already


class RecordConfig(Slot):
    """What a record is, where it is no plain text."""

    @abstractmethod
    def turns(self, values: Values, where: str) -> list[Turn]:
        """Returns the turns of the record with these fields. Raises BadRecord, which names place, field and fault."""

    def recognised(self, values: Values, where: str) -> tuple[Self, str]:
        """Returns this config with fields that were not named filled in from those that the record has, and the name of the recognised
        form; '' where all fields were named."""
        return self, ""

    def unread(self, values: Values) -> set[str]:
        """Returns the names of the record's fields that hold something and are not read, which the preparation tells."""
        return set()

    @abstractmethod
    def passages(self, documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Passage]:
        """Returns the passages that the turns of each document become."""

    def n_ids(self, tokenizer: Tokenizer) -> int:
        """Returns the number that all ids of passages are below."""
        return tokenizer.vocab_size

    def specials(self) -> tuple[str, ...]:
        """Returns the special tokens that the passages contain, which a tokenizer made here must have."""
        return ()

    def prompts(self) -> dict[str, str]:
        """Returns what is written before a query and before a document that it is to find, by these names; {} where nothing is."""
        return {}

    def named_template(self) -> str | None:
        """Returns the name or path of the chat template that the config names; None where it names none."""
        return None

    def chat_template(self, tokenizer: Tokenizer) -> str | None:
        """Returns the source text of the chat template that writes the turns; None where no template does."""
        return None


def text_passages(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Passage]:
    """Yields [bos] text [eos] of documents that are one text each, in pieces of a size that is encoded at once."""
    for document in documents:
        for number, (text, after) in enumerate(pairwise(chain(split_text(document.chunks), [""]))):
            head, tail = tokenizer.prefix if number == 0 else [], [] if after else tokenizer.suffix
            yield Passage(document.split, text, head, tail, number == 0, not after)
