"""The usual forms of chats, told by the fields of a record."""

from typing import NamedTuple

from lm.data.records.base import Values
from lm.data.records.fields import bad_record, names


class Form(NamedTuple):
    """Fields that a record of this form has, and one that it may have between the question and the answer."""

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


def chat_form(values: Values, where: str) -> Form:
    """Returns the only form that the record can be of; BadRecord where there is none or more than one."""
    there = {field for field, value in values.items() if value is not None}
    found = [form for form in CHATS if there.issuperset(form.fields)]
    if len(found) != 1:
        said = f"could be read as {' and as '.join(form.name for form in found)}" if found else "are those of no usual form of a chat"
        remedy = "Set data.record.messages, or data.record.user and data.record.assistant, fix the record"
        raise bad_record(f"{where}: its fields {names(values)} {said}. {remedy}")
    return found[0]
