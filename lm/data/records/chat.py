"""Chats, of which the assistant's part is learned."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from lm.data.records.base import GIVEN, LEARNED, Values
from lm.data.records.fields import bad_record, text_of
from lm.data.records.messages import MessagesRecord
from lm.data.sources.base import ASSISTANT, Turn

if TYPE_CHECKING:
    from lm.data.tokenizer.chat import ChatTemplate, Run


class ChatRecord(MessagesRecord):
    """Messages of several speakers, of which the assistant's are learned."""

    kind: Literal["chat"] = "chat"
    messages: str | None = "messages"
    """Field of the list of messages. null: one turn out of the fields `user` and `assistant`."""
    user: list[str] = []
    """Fields of what the user says, one below the other; empty ones are passed over."""
    assistant: str | None = None
    """Field of the answer."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.messages is None) != bool(self.user and self.assistant):
            raise ValueError("either messages, or both user and assistant name the fields of a chat. Set messages=null to use the latter.")
        return self

    def turns(self, values: Values, where: str) -> list[Turn]:
        if self.messages is not None:
            turns = self.messages_of(values, self.messages, "data.record.messages", where)
        else:
            assert self.assistant is not None
            asked = [text_of(values, field, "data.record.user", where) for field in self.user]
            answer = Turn(ASSISTANT, text_of(values, self.assistant, "data.record.assistant", where))
            turns = [Turn("user", "\n\n".join(filter(None, asked))), answer]
        if not any(turn.role == ASSISTANT for turn in turns):
            raise bad_record(f"{where}: no message is the assistant's, so there is nothing to learn. Fix the record")
        return turns

    def runs(self, turns: Sequence[Turn], template: "ChatTemplate") -> list[tuple["Run", int]]:
        return [(run, LEARNED if run.learned else GIVEN) for run in template.runs(turns)]
