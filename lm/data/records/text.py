"""Documents that are one text each: [bos] text [eos]."""

from collections.abc import Iterator
from itertools import chain, pairwise

from lm.data.records.base import Passage, Passages, RecordConfig
from lm.data.sources.base import Document
from lm.data.tokenizer.tokenizer import Tokenizer, split_text


class TextPassages:
    """The text in parts that can be encoded at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._prefix, self._suffix = tokenizer.prefix, tokenizer.suffix

    def __call__(self, document: Document) -> Iterator[Passage]:
        for number, (text, after) in enumerate(pairwise(chain(split_text(document.chunks), [""]))):
            head, tail = self._prefix if number == 0 else [], [] if after else self._suffix
            yield Passage(document.split, text, head, tail, number == 0, not after)


def passages_of(record: RecordConfig | None, tokenizer: Tokenizer) -> Passages:
    """Returns what makes passages of documents that are such records; None: of texts."""
    return TextPassages(tokenizer) if record is None else record.passages(tokenizer)
