"""Sums, by their number."""

from operator import add, mul, sub
from pathlib import Path

import pytest

from lm.data.kinds import ArithmeticConfig, ChatRecord, PromptRecord, RecordConfig
from lm.data.sources.base import Document
from lm.errors import ConfigError

SIGNS = {"+": add, "-": sub, "*": mul}


def documents(**options: object) -> list[Document]:
    return list(ArithmeticConfig(**options).open(Path()).documents())


def test_every_sum_is_right_and_comes_once_and_none_is_on_both_sides() -> None:
    found = documents(digits=2, operations=["+", "-", "*"], problems=30_000)
    asked = [document.turns[0].text for document in found]
    assert len(set(asked)) == len(asked) == 30_000
    for document in found:
        question, answer = (turn.text for turn in document.turns)
        sign = next(sign for sign in SIGNS if sign in question)
        assert str(SIGNS[sign](*map(int, question.split(sign)))) == answer
    held_out = sum(document.split == "val" for document in found)
    assert 0.09 < held_out / len(found) < 0.11


def test_a_sum_is_a_function_of_the_seed_and_its_number() -> None:
    few, many, other = (documents(problems=n, problem_seed=seed) for n, seed in ((50, 3), (5000, 3), (50, 4)))
    assert [one.turns for one in few] == [one.turns for one in many[:50]] != [one.turns for one in other]
    assert [one.split for one in few] == [one.split for one in many[:50]]  # nor does a longer list move one to the other side


def test_without_a_record_sums_are_texts() -> None:
    [text, *_] = documents(record=None, problems=9)
    assert eval("".join(text.chunks).replace("=", "==")) is True


@pytest.mark.parametrize(
    ("options", "said"),
    [({"digits": 1, "problems": 101}, "problems=101 are more than the 100 that differ"), ({"operations": ["+", "+"]}, "names one twice")],
)
def test_sums_that_cannot_be_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ArithmeticConfig(**options)


@pytest.mark.parametrize("record", [ChatRecord(template="chatml"), PromptRecord(answer="answer")])
def test_a_record_that_names_no_fields_finds_them(record: RecordConfig) -> None:
    """Seen: data.record.kind=chat, which an error message tells to write, ended with an internal error."""
    assert [turn.role for turn in documents(record=record, problems=8)[0].turns] == ["user", "assistant"]
