"""Arguments of verbs that do not compose are taken as they stand."""

from typing import Annotated, Literal

import pytest
from pydantic import Field

from lm.cli.compose.literal import parse_literal
from lm.config import Config
from lm.errors import ConfigError


class Apple(Config):
    kind: Literal["apple"] = "apple"
    weight: float = 1.0


class Pear(Config):
    kind: Literal["pear"] = "pear"
    files: str | list[str]
    ripe: bool = True


class Ask(Config):
    prompt: list[str] = []
    name: str | None = None
    top_k: int | None = Field(None, gt=0)
    temperature: float = 1.0
    stop: str | list[str] = []
    numbers: list[int] = []
    fruit: Annotated[Apple | Pear, Field(discriminator="kind")] = Apple()


@pytest.mark.parametrize(
    "text", ["def main(", "a=b", "What's up?", "Hello, world", "[1, 2]", "", " ", "${oc.env:HOME}", "null", "日本\n語", "1e-3"]
)
def test_a_prompt_may_hold_anything(text: str) -> None:
    assert parse_literal(Ask, [f"prompt={text}", f"name={text}"]).model_dump(include={"prompt", "name"}) == {"prompt": [text], "name": text}


def test_other_fields_are_read_by_type() -> None:
    asked = parse_literal(Ask, ["top_k=12", "temperature=1e-3", "numbers=[1,2]"])
    assert (asked.top_k, asked.temperature, asked.numbers) == (12, 0.001, [1, 2])
    assert parse_literal(Ask, ["top_k=null"]).top_k is None
    assert parse_literal(Ask, ["numbers=3", "numbers=4"]).numbers == [3, 4]


def test_a_list_grows_with_every_mention() -> None:
    asked = parse_literal(Ask, ["prompt=a", "prompt=b", "stop=x"])
    assert (asked.prompt, asked.stop) == (["a", "b"], "x")
    assert parse_literal(Ask, ["stop=x", "stop=y", "stop=z"]).stop == ["x", "y", "z"]


def test_a_section_is_chosen_by_kind_and_filled_by_dotted_keys_in_any_order() -> None:
    assert parse_literal(Ask, ["fruit.files=a=b.txt", "fruit=pear"]).fruit == Pear(files="a=b.txt")
    assert parse_literal(Ask, ["fruit=pear", "fruit.files=a", "fruit.files=b", "fruit.ripe=false"]).fruit == Pear(
        files=["a", "b"], ripe=False
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["promt=x"], ["promt: there is no such key", "Did you mean 'prompt'?"]),
        (["prompt"], ["prompt: this is not of the form key=value"]),
        (["top_k=0"], ["top_k: 0 does not fit", "greater than 0"]),
        (["top_k=many"], ["top_k: 'many' does not fit", "integer"]),
        (["temperature=nan"], ["temperature", "does not fit"]),
        (["top_k=1", "top_k=2"], ["top_k: it was given twice"]),
        (["fruit.files=a", "fruit=paer"], ["fruit: 'paer' is not an option", "Did you mean 'pear'?"]),
        (["fruit=pear"], ["fruit.files: a value is missing"]),
        (["fruit=pear", "fruit.ripee=true"], ["fruit.ripee: there is no such key", "Did you mean 'ripe'?"]),
    ],
)
def test_a_mistake_is_told_in_one_sentence(args: list[str], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_literal(Ask, args)
    for part in expected:
        assert part in str(error.value).splitlines()[-1]
