"""What a record is, where it is no plain text: how its turns are read, and what they become before they are encoded."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lm.data.sources.base import Document, Split, Turn
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.schema import Slot

GIVEN, LEARNED = 0, 1  # kinds of the parts of a record; of the second of two answers OTHER more
OTHER = 2
Values = Mapping[str, Any]
Passages = Callable[[Document], Iterator["Passage"]]


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


class RecordConfig(Slot):
    """What a record is, where it is no plain text."""

    @abstractmethod
    def turns(self, values: Values, where: str) -> list[Turn]:
        """Returns who says what in the record of these fields; BadRecord names place, field and fault."""

    @abstractmethod
    def passages(self, tokenizer: Tokenizer) -> Passages:
        """Returns what makes passages of the turns of each document."""

    def specials(self) -> tuple[str, ...]:
        """Returns special tokens that its passages hold, for a tokenizer made here."""
        return ()

    def chat_template(self, tokenizer: Tokenizer) -> str | None:
        """Returns the source of the template that writes its turns; None where none does."""
        return None
