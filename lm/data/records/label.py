"""Records that are a text and the label of what kind of text it is."""

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

from lm.data.records.base import GIVEN, LEARNED, Passage, RecordConfig, Values
from lm.data.records.fields import bad_record, shown, text_of, value_of
from lm.data.sources.base import Document, Turn
from lm.data.tokenizer.tokenizer import Tokenizer


class LabelRecord(RecordConfig):
    """A text and which kind of text it is: whether a review is good, what a question is about. In the name of a field a dot leads into an
    object: meta.topic."""

    kind: Literal["label"] = "label"
    text: str = "text"
    """Field of the text."""
    label: str = "label"
    """Field of the label: its name, or its number, counted from 0; true and false are names."""

    def turns(self, values: Values, where: str) -> list[Turn]:
        label = value_of(values, self.label, "data.record.label", where)
        if not isinstance(label, str | int) and not (isinstance(label, float) and label.is_integer()):  # a column with gaps has floats
            raise bad_record(f"{where}: field '{self.label}' holds {shown(label)}, neither a name nor a whole number. Fix the record")
        name = shown(label) if isinstance(label, bool) else label.strip() if isinstance(label, str) else str(int(label))
        return [Turn("source", text_of(values, self.text, "data.record.text", where)), Turn("label", name)]

    def passages(self, documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Passage]:
        """Yields the beginning and the text, then the label's bytes, which are the same whatever the tokenizer makes of its name."""
        for document in documents:
            source, label = document.turns
            yield Passage(document.split, source.text, tokenizer.prefix, [], True, False, GIVEN, counted=False)
            name = np.frombuffer(label.text.encode(), np.uint8).astype(np.int64)
            yield Passage(document.split, label.text, [], [], False, True, LEARNED, ids=name)
