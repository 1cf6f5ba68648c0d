"""Records that are prompts, which a model answers itself."""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field

from lm.data.records.base import Values
from lm.data.records.fields import bad_record, names, text_of, value_of
from lm.data.records.forms import history_field, prompt_fields, system_field
from lm.data.records.messages import MessagesRecord, last_learned, tools_of
from lm.data.sources.base import ASSISTANT, Turn

if TYPE_CHECKING:
    from lm.data.tokenizer.chat import ChatTemplate, Run


class PromptRecord(MessagesRecord):
    """What a model answers itself, for rewards: a text or messages up to the user's last."""

    kind: Literal["prompt"] = "prompt"
    prompt: str | None = None
    """Field of the prompt, a text or messages. null: prompt, question or instruction; or else messages, or conversations."""
    answer: str | Annotated[list[str], Field(min_length=1)] | None = None
    """Field that rewards may compare an answer with: a text, or the JSON of what else it holds; or a list of fields, as the JSON of an
    object. null: there is none, and val_loss is of the last message said again."""

    def turns(self, values: Values, where: str) -> list[Turn]:
        """Returns the messages of the prompt, then the reference as the assistant's."""
        asked = self.asked(values, [self._field(values, where)], "data.record.prompt", where)
        if not asked or asked[-1].role == ASSISTANT:
            raise bad_record(f"{where}: the prompt ends with no message that the assistant could answer. Fix the record")
        reference = asked[-1].text if self.answer is None else self._reference(values, self.answer, where)
        prompt = self.after_system(values, self.behind_earlier(values, asked, where), where)
        return [*tools_of(values, where), *prompt, Turn(ASSISTANT, reference)]

    def recognised(self, values: Values, where: str) -> tuple[Self, str]:
        if self.prompt is not None:
            return self, ""
        named = {"system": self.system or system_field(values), "history": self.history or history_field(values)}
        told = [self._field(values, where), *self._answers(), *named.values()]
        return self.model_copy(update=named), f"prompts ({', '.join(filter(None, told))})"

    def read(self, values: Values) -> Iterable[str | None]:
        return self._field(values, ""), *self._answers()

    def _answers(self) -> list[str | None]:
        return [*self.answer] if isinstance(self.answer, list) else [self.answer]

    def _reference(self, values: Values, fields: str | list[str], where: str) -> str:
        key = "data.record.answer"
        each = {field: value_of(values, field, key, where) for field in ([fields] if isinstance(fields, str) else fields)}
        name, held = ", ".join(each), each[fields] if isinstance(fields, str) else each
        said = held if held is None or isinstance(held, str) else json.dumps(held, ensure_ascii=False, default=str)
        return text_of({name: said}, name, key, where)

    def _field(self, values: Values, where: str) -> str:
        if self.prompt is not None:
            return self.prompt
        found = prompt_fields(values, ("messages", "conversations"))
        if len(found) != 1:
            which = f"{' and '.join(found)} could each be the prompt" if found else "none of which is a prompt"
            raise bad_record(f"{where}: its fields are {names(values)}; {which}. Set data.record.prompt, fix the record")
        return found[0]

    def runs(self, turns: Sequence[Turn], template: "ChatTemplate") -> list[list[tuple["Run", int]]]:
        """The reference stands where the assistant's answer would; earlier answers are not learned."""
        return [last_learned(template.runs(turns))]
