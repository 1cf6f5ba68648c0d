"""Records that are one answer to a prompt, and whether it is a good one."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Self

from lm.data.records.base import OTHER, Values
from lm.data.records.chat import ConversationRecord
from lm.data.records.fields import bad_record, shown, truth, value_of
from lm.data.records.messages import last_learned
from lm.data.sources.base import ASSISTANT, Turn

if TYPE_CHECKING:
    from lm.data.tokenizer.chat import ChatTemplate, Run

_GOOD, _BAD = "chosen", "rejected"  # roles of the answer, as of preferences


class RatedRecord(ConversationRecord):
    """A chat whose last message, the assistant's, is rated as good or bad: a thumb up or down."""

    kind: Literal["rated"] = "rated"
    label: str = "label"
    """Field that says so: true or false, 1 or 0, in a csv file as text."""

    def recognised(self, values: Values, where: str) -> tuple[Self, str]:
        named, told = super().recognised(values, where)
        return named, told and f"{told}, {self.label}"

    def read(self, values: Values) -> Iterable[str | None]:
        return *super().read(values), self.label

    def turns(self, values: Values, where: str) -> list[Turn]:
        """Returns the messages, the last one as the chosen or the rejected answer."""
        label, turns = value_of(values, self.label, "data.record.label", where), self.said(values, where)
        if (good := truth(label)) is None:
            raise bad_record(
                f"{where}: field '{self.label}' holds {shown(label)}, and an answer is good or not: true or false. Fix the record"
            )
        if turns[-1].role != ASSISTANT:
            raise bad_record(f"{where}: the last message is not the assistant's, so no answer is rated. Fix the record")
        return [*turns[:-1], turns[-1]._replace(role=_GOOD if good else _BAD)]

    def runs(self, turns: Sequence[Turn], template: "ChatTemplate") -> list[list[tuple["Run", int]]]:
        """The last answer is learned; all of the text of a bad one is of OTHER kinds."""
        *before, answer = turns
        return [last_learned(template.runs([*before, answer._replace(role=ASSISTANT)]), OTHER * (answer.role == _BAD))]
