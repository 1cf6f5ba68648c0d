"""Records that are a text, or two, and the label of what kind of text it is."""

import json
import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lm.data.records.base import GIVEN, LEARNED, Passage, RecordConfig, Values
from lm.data.records.fields import bad_record, shown, text_of, value_of
from lm.data.sources.base import Document, Turn
from lm.data.tokenizer.tokenizer import Tokenizer

_KEY = "data.record.label"


class LabelRecord(RecordConfig):
    """A text and which kind of text it is: whether a review is good, what a question is about; or two texts and how they go together:
    whether the second follows from the first. In the name of a field a dot leads into an object: meta.topic."""

    kind: Literal["label"] = "label"
    text: str = "text"
    """Field of the text."""
    text_pair: str | None = None
    """Field of a second text (hypothesis, sentence2). null: there is none."""
    label: str | Annotated[list[str], Field(min_length=1)] = "label"
    """Field of the label: its name, or its number, counted from 0; a list of these where several may be right at once; or the number that
    is to be told. true and false are names. A list of fields: of a field for each label, 1 or true where it is right, 0 or false where it
    is not. A record where it, or one of them, is null is left out."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if isinstance(self.label, list) and (twice := [field for field in self.label if self.label.count(field) > 1]):
            raise ValueError(f"label has the field '{twice[0]}' twice, and each is a label. Name it once.")
        return self

    def turns(self, values: Values, where: str) -> list[Turn]:
        label = self._right(values, where) if isinstance(self.label, list) else value_of(values, self.label, _KEY, where)
        if label is None or label != label:  # or NaN, as which a table may have a gap
            label = ""
        names = [_name(each) for each in label] if isinstance(label, list) else [_name(label)]
        if any(name is None or (not name and isinstance(label, list)) for name in names):
            rule = "neither a name, nor a number, nor a list of names"
            raise bad_record(f"{where}: field '{self.label}' holds {shown(label)}, {rule}. Fix the record")
        name = json.dumps(names, ensure_ascii=False) if isinstance(label, list) else str(names[0])
        texts = [text_of(values, self.text, "data.record.text", where)]
        if self.text_pair is not None:
            texts.append(text_of(values, self.text_pair, "data.record.text_pair", where))
        return [*(Turn("source", text) for text in texts), Turn("label", name)]

    def _right(self, values: Values, where: str) -> list[str] | None:
        """Returns the fields that hold 1 or true; None where one holds nothing."""
        found: list[str] = []
        for field in self.label:
            mark = value_of(values, field, _KEY, where)
            if mark is None or mark != mark or mark == "":
                return None
            if (name := (_name(mark) or "").lower()) not in ("0", "1", "false", "true"):
                rule = "and a field for each label holds 1 or true, or 0 or false"
                raise bad_record(f"{where}: field '{field}' holds {shown(mark)}, {rule}. Fix the record, give {_KEY} one field")
            found += [field] if name in ("1", "true") else []
        return found

    def n_ids(self, tokenizer: Tokenizer) -> int:
        """Returns that of tokens, or of bytes, which labels are."""
        return max(tokenizer.vocab_size, 256)

    def passages(self, documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Passage]:
        """Yields the beginning and the text, the second text, if any, then the label's bytes, which are the same whatever the tokenizer
        makes of its name."""
        for document in documents:
            *sources, label = document.turns
            for number, source in enumerate(sources):
                begun = [] if number else tokenizer.prefix
                yield Passage(document.split, source.text, begun, [], not number, False, GIVEN, counted=False)
            name = np.frombuffer(label.text.encode(), np.uint8).astype(np.int64)
            yield Passage(document.split, label.text, [], [], False, True, LEARNED, ids=name)


def _name(label: object) -> str | None:
    """Returns a label as text, whole numbers without a point, which columns with gaps give them; None of what is no label."""
    if isinstance(label, bool):
        return shown(label)
    if isinstance(label, str):
        return label.strip()
    if isinstance(label, float):
        return str(int(label)) if label.is_integer() else repr(label) if math.isfinite(label) else None
    return str(label) if isinstance(label, int) else None
