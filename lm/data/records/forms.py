"""The usual forms of chat records, recognised by a record's fields."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from lm.data.records.base import Values
from lm.data.records.fields import bad_record, listed, names
from lm.data.sources.base import ASSISTANT, Turn

_SPEAKERS = {"Human": "user", "Assistant": ASSISTANT}


class Form(NamedTuple):
    """A form of chat records: the fields that it must have, and an optional one whose text goes between question and answer."""

    name: str
    fields: tuple[str, ...]  # of messages, or of a question and its answer
    between: str | None = None


CHATS = (
    Form("OpenAI", ("messages",)),
    Form("ShareGPT", ("conversations",)),
    Form("Alpaca", ("instruction", "output"), "input"),
    Form("Dolly", ("instruction", "response"), "context"),
    Form("prompt and completion", ("prompt", "completion")),
    Form("prompt and response", ("prompt", "response")),
    Form("question and answer", ("question", "answer")),
)


def dialogue(text: str) -> list[Turn]:
    """Returns the turns of a text that is a whole chat, as of hh-rlhf: "\\n\\nHuman: ...\\n\\nAssistant: ..."; [] where it is none."""
    before, *parts = re.split(r"(?:^|\n\n)(Human|Assistant):", text)
    if before.strip() or parts[:1] != ["Human"]:
        return []
    return [Turn(_SPEAKERS[who], said.strip()) for who, said in zip(parts[::2], parts[1::2], strict=True)]


def prompt_fields(values: Values, otherwise: Sequence[str] = ("conversations",)) -> list[str]:
    """Returns the usual fields of a prompt that the record has, or else those of `otherwise`."""
    named = [field for field in ("prompt", "question", "instruction") if values.get(field) is not None]
    return named or [field for field in otherwise if values.get(field) is not None]


def system_field(values: Values) -> str | None:
    """Returns the usual field of a system prompt beside a chat, where the record has one that is not blank."""
    said = values.get("system")
    return "system" if isinstance(said, str) and said.strip() else None


def history_field(values: Values) -> str | None:
    """Returns the usual field of earlier turns beside a question and its answer, where the record has one with a list that is not empty."""
    found = listed(values.get("history"))
    return "history" if isinstance(found, list) and found else None


def chat_form(values: Values, where: str) -> Form:
    """Returns the form of a record. Raises BadRecord where its fields fit no form or more than one."""
    there = {field for field, value in values.items() if value is not None}
    found = [form for form in CHATS if there.issuperset(form.fields)]
    if len(found) != 1:
        said = f"could be read as {' and as '.join(form.name for form in found)}" if found else "are those of no usual form of a chat"
        remedy = "Set data.record.messages, or data.record.user and data.record.assistant, fix the record"
        raise bad_record(f"{where}: its fields {names(values)} {said}. {remedy}")
    return found[0]
