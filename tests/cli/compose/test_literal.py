"""Arguments of verbs that do not compose are taken as they stand."""

import pytest
from pydantic import Field

from lm.cli.compose.arguments import take
from lm.cli.verb import Verb
from lm.errors import ConfigError
from lm.schema import MaybeEmpty


class Ask(Verb):
    prompt: list[MaybeEmpty] = []
    name: MaybeEmpty | None = None
    top_k: int | None = Field(None, gt=0)
    temperature: float = 1.0
    stop: str | list[str] = []
    numbers: list[int] = []
    ripe: bool = True

    def run(self, rest: list[str]) -> None:
        self.refuse(rest)


def asked_for(args: list[str]) -> Ask:
    asked, rest = take(Ask, args)
    asked.run(rest)
    return asked


@pytest.mark.parametrize(
    "text", ["def main(", "a=b", "What's up?", "Hello, world", "[1, 2]", "", " ", "${oc.env:HOME}", "null", "日本\n語", "1e-3"]
)
def test_a_prompt_may_hold_anything(text: str) -> None:
    asked = asked_for([f"prompt={text}", f"name={text}"])
    assert (asked.prompt, asked.name) == ([text], None if text == "null" else text)


def test_other_fields_are_read_by_type() -> None:
    asked = asked_for(["top_k=12", "temperature=1e-3", "numbers=[1,2]"])
    assert (asked.top_k, asked.temperature, asked.numbers) == (12, 0.001, [1, 2])
    assert [asked_for([f"ripe={text}"]).ripe for text in ("false", "False", "true", "True")] == [False, False, True, True]
    assert asked_for(["top_k=null"]).top_k is None
    assert asked_for(["numbers=3", "numbers=4"]).numbers == [3, 4]


def test_a_list_grows_with_every_mention() -> None:
    asked = asked_for(["prompt=a", "prompt=b", "stop=x"])
    assert (asked.prompt, asked.stop) == (["a", "b"], "x")
    assert asked_for(["stop=x", "stop=y", "stop=z"]).stop == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["promt=x"], ["promt: there is no such key", "Did you mean 'prompt'?"]),
        (["prompt"], ["prompt: this is not of the form key=value"]),
        (["top_k=0"], ["top_k: 0 does not fit", "greater than 0"]),
        (["top_k=many"], ["top_k: 'many' does not fit", "integer"]),
        (["temperature=nan"], ["temperature", "does not fit"]),
        (["top_k=1", "top_k=2"], ["top_k: it was given twice"]),
        (["ripe=ture"], ["ripe: 'ture' is not an option", "Did you mean 'true'? Options: true, false."]),
        (["ripe=1"], ["ripe: '1' is not an option", "true", "false"]),
    ],
)
def test_a_mistake_is_told_in_one_sentence(args: list[str], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        asked_for(args)
    for part in expected:
        assert part in str(error.value).splitlines()[-1]
