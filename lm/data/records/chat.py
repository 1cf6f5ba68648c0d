"""Records that are chats, in which the assistant's messages are learned."""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from lm.data.records.base import GIVEN, LEARNED, Values
from lm.data.records.fields import bad_record
from lm.data.records.forms import chat_form, history_field, system_field
from lm.data.records.messages import MessagesRecord, tools_of
from lm.data.sources.base import ASSISTANT, TOOLS, Turn
from lm.errors import ConfigError

if TYPE_CHECKING:
    from lm.data.tokenizer.chat import ChatTemplate, Run


class ConversationRecord(MessagesRecord):
    """Messages of several speakers, by whatever fields."""

    messages: str | None = None
    """Field of the list of messages. null: one turn out of the fields `user` and `assistant`, or where these are not set either, what the
    record's fields tell: OpenAI, ShareGPT, Alpaca, Dolly, prompt and completion, question and answer."""
    user: list[str] = []
    """Fields of what the user says, one below the other; empty ones are passed over."""
    assistant: str | None = None
    """Field of the answer."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.user) != bool(self.assistant) or (self.messages and (self.user or self.history)):
            raise ValueError(
                "either messages, or user and assistant, with or without history, name the fields of a chat. Leave the others out."
            )
        return self

    def recognised(self, values: Values, where: str) -> tuple[Self, str]:
        if self.messages or self.user:
            return self, ""
        form, system = chat_form(values, where), self.system or system_field(values)
        history = None if len(form.fields) == 1 else self.history or history_field(values)
        told = f"{form.name} ({', '.join([*form.fields, *(name for name in (history, system) if name)])})"
        if len(form.fields) == 1:
            return self.model_copy(update={"messages": form.fields[0], "system": system}), told
        asked, answer = form.fields
        between = [form.between] if form.between and values.get(form.between) is not None else []
        named = {"user": [asked, *between], "assistant": answer, "history": history, "system": system}
        return self.model_copy(update=named), told

    def read(self, values: Values) -> Iterable[str | None]:
        return self.messages, *self.user, self.assistant

    def said(self, values: Values, where: str) -> list[Turn]:
        """Returns the turns of the record, whoever speaks. Raises as `turns`."""
        if self.messages is not None:
            turns = self.messages_of(values, self.messages, "data.record.messages", where)
        else:
            assert self.assistant is not None
            asked = self.asked(values, self.user, "data.record.user", where)
            answer = self.turns_of(values, self.assistant, ASSISTANT, "data.record.assistant", where)
            turns = [*self.behind_earlier(values, asked, where), *answer]
        return [*tools_of(values, where), *self.after_system(values, turns, where)]


class ChatRecord(ConversationRecord):
    """Messages of several speakers, of which the assistant's are learned."""

    kind: Literal["chat"] = "chat"

    def recognised(self, values: Values, where: str) -> tuple[Self, str]:
        named, told = super().recognised(values, where)
        if told and named.assistant == "completion" and values.get("label") is False:
            remedy = "Learn from it by data=rated objective=kto, name data.record.user and data.record.assistant to learn it all the same"
            raise bad_record(f"{where}: its label is false, as of a bad completion in KTO's form, which is not to be learned. {remedy}")
        return named, told

    def turns(self, values: Values, where: str) -> list[Turn]:
        turns = self.said(values, where)
        if not any(turn.role == ASSISTANT and _weighs(turn) for turn in turns):
            raise bad_record(f"{where}: no message is the assistant's, or none has weight, so there is nothing to learn. Fix the record")
        return turns

    def runs(self, turns: Sequence[Turn], template: "ChatTemplate") -> list[list[tuple["Run", int]]]:
        """The assistant's messages are learned, except those with `weight: 0` (OpenAI's format) or `train: false` (axolotl's)."""
        runs, weighs = template.runs(turns), [_weighs(turn) for turn in turns if turn.role == ASSISTANT]
        if all(weighs):
            return [[(run, LEARNED if run.learned else GIVEN) for run in runs]]
        n_learned = sum(run.learned for run in runs)
        if len(weighs) == n_learned + 1 and next(turn.role for turn in turns if turn.role != TOOLS) == ASSISTANT:
            del weighs[0]  # a first message that the template cannot ask for is not learned
        if len(weighs) != n_learned:
            raise ConfigError(
                "data.record: a message has weight 0 or train: false, and the template writes some answer in several pieces. Leave it out."
            )
        each = iter(weighs)
        return [[(run, LEARNED if run.learned and next(each) else GIVEN) for run in runs]]


def _weighs(turn: Turn) -> bool:
    """Whether an assistant's turn is to be learned: neither weight: 0 nor train: false was beside it."""
    return not turn.also or json.loads(turn.also).get("weight") != 0
