"""Records that are pairs of a source and a target text."""

from collections.abc import Iterable, Iterator
from typing import Literal

from lm.data.records.base import GIVEN, LEARNED, Passage, RecordConfig, Values
from lm.data.records.fields import text_of
from lm.data.sources.base import Document, Turn
from lm.data.tokenizer.source import around
from lm.data.tokenizer.tokenizer import Tokenizer


class PairRecord(RecordConfig):
    """A text and what follows from it: a translation, a summary. In the name of a field a dot leads into an object: translation.de."""

    kind: Literal["pair"] = "pair"
    source: str = "source"
    """Field of the given text."""
    target: str = "target"
    """Field of the text to be learned."""

    def turns(self, values: Values, where: str) -> list[Turn]:
        source = text_of(values, self.source, "data.record.source", where)
        return [Turn("source", source), Turn("target", text_of(values, self.target, "data.record.target", where))]

    def passages(self, documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Passage]:
        """Yields the source as the encoder reads it, then target [eos]. The decoder's first tokens are added by the rows, not here."""
        before, behind = around(tokenizer)
        for document in documents:
            source, target = document.turns
            yield Passage(document.split, source.text, before, behind, True, False, GIVEN, counted=False)
            yield Passage(document.split, target.text, [], tokenizer.suffix, False, True, LEARNED)
