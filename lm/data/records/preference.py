"""Records that are preferences: two answers to one prompt."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Self

from lm.data.records.base import OTHER, Values
from lm.data.records.fields import bad_record, names, text_of, value_of
from lm.data.records.forms import dialogue, history_field, prompt_fields, system_field
from lm.data.records.messages import MessagesRecord, last_learned, tools_of
from lm.data.sources.base import ASSISTANT, Turn

if TYPE_CHECKING:
    from lm.data.tokenizer.chat import ChatTemplate, Run


class PreferenceRecord(MessagesRecord):
    """Two answers to one prompt: a text each, or a message, which may call tools, or messages that end with the answer. Messages that begin
    with the assistant's go on from the prompt; others begin with it."""

    kind: Literal["preference"] = "preference"
    prompt: str | None = None
    """Field of the prompt, a text or messages. null: chosen and rejected are messages that begin with it, or else the field prompt or
    question or instruction, with input below it, or conversations where there is none of these; or else they are texts that begin with it,
    of turns of Human: and Assistant:, as in hh-rlhf."""
    chosen: str = "chosen"
    """Field of the better answer."""
    rejected: str = "rejected"
    """Field of the worse answer."""

    def turns(self, values: Values, where: str) -> list[Turn]:
        """Returns the messages of the prompt, then the chosen and the rejected answer."""
        before, chosen = self._answer(values, self.chosen, "data.record.chosen", where)
        also_before, rejected = self._answer(values, self.rejected, "data.record.rejected", where)
        if before != also_before:
            fields = f"'{self.chosen}' and '{self.rejected}'"
            raise bad_record(f"{where}: fields {fields} do not begin with the same messages. Fix the record")
        if not before or (before[0].role in (ASSISTANT, "tool") and (self.prompt or prompt_fields(values))):
            asked = self.asked(values, [self._prompt_field(values, where), *self._between(values)], "data.record.prompt", where)
            if len(asked) == 1 and (said := dialogue(asked[0].text)) and said[-1] == Turn(ASSISTANT, ""):
                asked = said[:-1]
            before = [*self.behind_earlier(values, asked, where), *before]
        before = self.after_system(values, before, where)
        return [*tools_of(values, where), *before, chosen._replace(role="chosen"), rejected._replace(role="rejected")]

    def recognised(self, values: Values, where: str) -> tuple[Self, str]:
        if self.prompt is not None:
            return self, ""
        system, history = self.system or system_field(values), self.history or (history_field(values) if prompt_fields(values) else None)
        beside = [name for name in (history, system) if name]
        told = [*prompt_fields(values)[:1], *self._between(values), self.chosen, self.rejected, *beside]
        whole = " as dialogues of Human and Assistant" * bool(self._dialogue(values, values.get(self.chosen)))
        unread = "; margin is not read, so that all pairs count alike" * isinstance(values.get("margin"), int | float)  # of TRL's rewards
        return self.model_copy(update={"system": system, "history": history}), ", ".join(told) + whole + unread

    def read(self, values: Values) -> Iterable[str | None]:
        asked = [self.prompt] if self.prompt is not None else prompt_fields(values)[:1]
        return *asked, *self._between(values), self.chosen, self.rejected, "margin"  # of which the form tells

    def _between(self, values: Values) -> list[str]:
        """Returns Alpaca's field `input` beside an instruction, where it is not blank."""
        said = values.get("input") if self.prompt is None and prompt_fields(values) == ["instruction"] else None
        return ["input"] if isinstance(said, str) and said.strip() else []

    def _dialogue(self, values: Values, held: object) -> list[Turn]:
        """Returns the turns of a text that begins with the prompt, where no field holds that; [] where it is none."""
        return dialogue(held) if isinstance(held, str) and self.prompt is None and not prompt_fields(values) else []

    def _prompt_field(self, values: Values, where: str) -> str:
        if self.prompt is not None:
            return self.prompt
        named = prompt_fields(values)
        if len(named) != 1:
            none = "none of which is the prompt, and the answers are no texts of '\\n\\nHuman: ' and '\\n\\nAssistant: ' that begin with it"
            which = f"{' and '.join(named)} could each be the prompt" if named else none
            raise bad_record(f"{where}: its fields are {names(values)}; {which}. Set data.record.prompt, fix the record")
        return named[0]

    def _answer(self, values: Values, field: str, key: str, where: str) -> tuple[list[Turn], Turn]:
        """Returns the messages before the answer, and the answer, with its thoughts and calls of tools."""
        held = value_of(values, field, key, where)
        if isinstance(held, str):
            text = text_of(values, field, key, where)
            turns = self._dialogue(values, text)
            if not turns:
                return [], Turn(ASSISTANT, text)
        else:
            turns = self.messages_of({field: [held]} if isinstance(held, Mapping) else values, field, key, where)
        if not turns or turns[-1].role != ASSISTANT:
            raise bad_record(f"{where}: field '{field}' does not end with the assistant's message. Fix the record")
        if json.loads(turns[-1].also or "{}").get("weight") == 0:
            what = "a message of weight 0 or train: false"
            raise bad_record(f"{where}: field '{field}' ends with {what}, and compared answers are learned. Fix the record")
        return turns[:-1], turns[-1]

    def runs(self, turns: Sequence[Turn], template: "ChatTemplate") -> list[list[tuple["Run", int]]]:
        """Returns the prompt with the chosen answer, then the prompt with the rejected answer; only the answers are learned."""
        *prompt, chosen, rejected = turns
        both = ((0, chosen), (OTHER, rejected))
        return [last_learned(template.runs([*prompt, answer._replace(role=ASSISTANT)]), offset) for offset, answer in both]
