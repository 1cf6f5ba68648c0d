"""Records that are two texts that belong together, and texts that do not belong to the first."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Self

from pydantic import model_validator

from lm.data.records.base import GIVEN, LEARNED, OTHER, Passage, RecordConfig, Values
from lm.data.records.fields import bad_record, listed, names, shown, text_of, value_of
from lm.data.sources.base import Document, Turn
from lm.data.tokenizer.tokenizer import Tokenizer

_USUAL = (
    ("anchor", "positive"), ("query", "positive"), ("query", "pos"), ("query", "answer"), ("question", "answer"),
    ("sentence1", "sentence2"), ("query", "passage"), ("query", "document"),
)  # fmt: skip
_NEGATIVE = re.compile(r"neg|negative(_\d+)?")
_TOLD = ("neg", "pos", "score", "label", "similarity")  # names that begin so, where they are not read


class AlikeRecord(RecordConfig):
    """Two texts that belong together: a question and what answers it, a sentence and its paraphrase; and texts that look like the second
    but do not belong to the first. In the name of a field a dot leads into an object: meta.title."""

    kind: Literal["alike"] = "alike"
    anchor: str | None = None
    """Field of the first text. null: anchor, query or question, or sentence1, as the other one's field goes with it."""
    positive: str | None = None
    """Field of the second text, or of a list of which it is the first. null: positive, pos, answer, passage, document or sentence2."""
    negative: str | list[str] | None = None
    """Field of a text that does not belong to the first, or of a list of such texts; or several such fields. null: neg, negative and
    negative_1, negative_2 ..., where there are any."""
    query_prompt: str | None = None
    """Written before the first text ("query: "). The model's folder keeps it, for lm embed prompt=query and for exports."""
    document_prompt: str | None = None
    """Written before the other texts ("passage: "); prompt=document."""

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.anchor is None) != (self.positive is None) or (self.negative is not None and self.anchor is None):
            raise ValueError("anchor and positive are named together. Set both, and negative where there is one, or none of them.")
        return self

    def recognised(self, values: Values, where: str) -> tuple[Self, str]:
        if self.anchor is not None:
            return self, ""
        there = {name for name, value in values.items() if value is not None}
        found = [pair for pair in _USUAL if there.issuperset(pair)]
        if len(found) != 1:
            which = (" and as " if found else ", ").join(f"{first} with {second}" for first, second in found or _USUAL)
            said = f"could be read as {which}" if found else f"have no usual names of two texts that belong together ({which})"
            raise bad_record(f"{where}: its fields {names(values)} {said}. Set data.record.anchor and data.record.positive, fix the record")
        negatives = [name for name in values if _NEGATIVE.fullmatch(str(name))]
        named = {"anchor": found[0][0], "positive": found[0][1], "negative": negatives}
        return self.model_copy(update=named), ", ".join([*found[0], *negatives])

    def unread(self, values: Values) -> set[str]:
        """Fields of any name may stand beside the texts; what looks like a further text of one of them is told, or like how well they
        belong together, since all are taken to do so."""
        many = _several(values.get(self.positive or ""))
        others = {f"all but the first of {self.positive}"} if many is not None and len(many) > 1 else set[str]()
        read = {self.anchor, self.positive, *self._negatives()}
        return others | {name for name in values if name not in read and str(name).startswith(_TOLD) and values[name] is not None}

    def turns(self, values: Values, where: str) -> list[Turn]:
        """Returns the anchor, the positive, then the negatives."""
        assert self.anchor is not None and self.positive is not None
        of_query, of_document = self.query_prompt or "", self.document_prompt or ""
        turns = [
            Turn("anchor", of_query + self._texts(values, self.anchor, "anchor", where)[0]),
            Turn("positive", of_document + self._texts(values, self.positive, "positive", where)[0]),
        ]
        for field in self._negatives():
            if value_of(values, field, "data.record.negative", where) is not None:
                turns += [Turn("negative", of_document + text) for text in self._texts(values, field, "negative", where, least=0)]
        return turns

    def prompts(self) -> dict[str, str]:
        return {name: text for name, text in (("query", self.query_prompt), ("document", self.document_prompt)) if text}

    def _negatives(self) -> list[str]:
        return [self.negative] if isinstance(self.negative, str) else self.negative or []

    def _texts(self, values: Values, field: str, option: str, where: str, least: int = 1) -> list[str]:
        """Returns the text in a field, or those of a list. Raises BadRecord for fewer than `least`, and for blank ones."""
        key = f"data.record.{option}"
        value = value_of(values, field, key, where)
        held = _several(value) if option != "anchor" else None
        texts = [text_of({field: text}, field, key, where) for text in ([value] if held is None else held)]
        if len(texts) < least or not all(text.strip() for text in texts):
            raise bad_record(f"{where}: field '{field}' holds {shown(value)}, and no text. Fix the record")
        return texts

    def passages(self, documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Passage]:
        """Yields each text with the beginning of one."""
        kinds = {"anchor": GIVEN, "positive": LEARNED, "negative": OTHER}
        for document in documents:
            last = len(document.turns) - 1
            for number, turn in enumerate(document.turns):
                yield Passage(document.split, turn.text, tokenizer.prefix, [], number == 0, number == last, kinds[turn.role])


def _several(value: object) -> list[Any] | None:
    """Returns a list of texts, as JSON too, as which tables hold one; None of anything else, such as a text that is code: [1, 2]."""
    if isinstance(value, list):
        return value
    found = listed(value)
    return found if isinstance(found, list) and found and all(isinstance(text, str) for text in found) else None
