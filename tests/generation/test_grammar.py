"""What must be JSON of a schema, a match of a regex or a text of a grammar is one, however it is drawn; what nothing can be is refused."""

import json
import re
from typing import Any

import pytest

import lm
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.drafting.model import DraftModel
from lm.generation.writer import Writer
from lm.nn.transformer import DecoderLM
from lm.schema import from_tree
from tests.conftest import Lm
from tests.generation.conftest import Save
from tests.nn.models import config, redrawn

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "on": {"type": "boolean"},
    },
    "required": ["name", "age", "on"],
    "additionalProperties": False,
}
WAYS: list[dict[str, Any]] = [
    {"temperature": 1.3, "n": 3},
    {"temperature": 0, "repetition_penalty": 2.0, "no_repeat_ngram": 1},
    {"temperature": 0.9, "top_k": 1, "lookup": 2, "n": 2},
    {"beams": 4, "n": 2},
]


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    return redrawn(config(vocab_size=320))


@pytest.fixture(name="run")
def verb(request: pytest.FixtureRequest) -> Lm:
    """The fixture lm, whose name is the package's here."""
    found: Lm = request.getfixturevalue("lm")
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_is_written_fits_the_schema(model: DecoderLM, tokenizer: Tokenizer, way: dict[str, Any]) -> None:
    found = lm.complete(model, tokenizer, ["ab", "c"], json_schema=json.dumps(SCHEMA), max_tokens=120, **way)
    assert found == lm.complete(model, tokenizer, ["ab", "c"], json_schema=SCHEMA, max_tokens=120, **way)
    assert len(found) == 2 * way.get("n", 1)
    for each in found:
        assert each.finish == "stop", each.text
        read = json.loads(each.text)
        assert read.keys() == {"name", "age", "on"} and len(read["name"]) <= 6 and 0 <= read["age"] <= 120 and read["on"] in (True, False)


@pytest.mark.parametrize(("regex", "n"), [("aaaa", 1), ("(yes|no)", 2), ("[ab]c", 2)])
def test_beams_are_no_more_than_there_are_texts(model: DecoderLM, tokenizer: Tokenizer, regex: str, n: int) -> None:
    """Behind what a form forbids a beam does not go on. Seen to fail with such beams taken."""
    found = lm.complete(model, tokenizer, "x", regex=regex, max_tokens=12, beams=4, n=4)
    assert len({each.text for each in found}) == len(found) == n
    assert all(re.fullmatch(regex, each.text) and each.finish == "stop" for each in found)


def test_fewer_texts_than_were_asked_for_are_printed_with_their_own_prompts(run: Lm, save: Save) -> None:
    """Seen to end with an internal error, and in JSON to name the first prompt with a text of the second."""
    asked = "generate", f"from={save('small', 0)}", "prompt=a", "prompt=b", "beams=4", "n=4", "regex=yes|no", "max_tokens=9"
    code, out, err = run(*asked)
    assert (code, err) == (0, "")
    assert re.fullmatch(r"(--- [1-4] of 4 ---\n[ab](yes|no)\n){4}", out)
    code, out, err = run(*asked, "format=json")
    assert (code, err) == (0, "")
    assert [each["prompt"] for each in json.loads(out)] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("way", [{"temperature": 1.5, "n": 4}, {"lookup": 1, "n": 4}, {"beams": 3, "n": 3}], ids=str)
def test_what_is_written_matches_the_regex_and_the_grammar(model: DecoderLM, tokenizer: Tokenizer, way: dict[str, Any]) -> None:
    for each in lm.complete(model, tokenizer, "x", regex="[ab]{2,5}é(yes|no)", max_tokens=40, **way):
        assert re.fullmatch("[ab]{2,5}é(yes|no)", each.text)
    sums = 'start: N ("+" N)* "="\nN: /[0-9]{1,3}/'
    for each in lm.complete(model, tokenizer, "x", grammar=sums, max_tokens=200, **way):
        assert re.fullmatch(r"\d{1,3}(\+\d{1,3})*=", each.text) or each.finish == "length"


def test_drafts_under_a_grammar_change_no_text(model: DecoderLM, tokenizer: Tokenizer) -> None:
    options = {"regex": "(abc|abd|[x-z]{3}){3,9}!", "max_tokens": 40, "n": 4, "temperature": 1.2}
    prompts = ["abcabd", "xyz"]
    plain = lm.generate(model, tokenizer, prompts, **options)
    assert lm.generate(model, tokenizer, prompts, lookup=2, **options) == plain
    drafter, cfg = DraftModel(3, redrawn(config(vocab_size=320), seed=1), model), from_tree(SamplingConfig, options)
    assert [each.text for each in Writer(model, tokenizer, cfg, drafter).complete(prompts)] == plain
    assert drafter.tally.drafted > drafter.tally.accepted > 0


@pytest.mark.parametrize("way", [{"n": 2}, {"lookup": 1, "n": 2}, {"beams": 2}], ids=str)
def test_where_llguidance_gives_up_nothing_else_is_written(model: DecoderLM, tokenizer: Tokenizer, way: dict[str, Any]) -> None:
    """Seen to fail: behind two letters of a text without an end its parser was full, and from there on all tokens were free."""
    nested = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
    forms: list[tuple[dict[str, Any], str]] = [({"grammar": 'start: "a" start'}, "a+"), ({"json_schema": nested}, r"\[+")]
    for given, rule in [*forms, ({"grammar": 'start: "b" | "a" start'}, "a*b?")]:
        for each in lm.complete(model, tokenizer, "x", max_tokens=20, **given, **way):
            assert re.fullmatch(rule, each.text), (given, each)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"regex": "[ab"}, "regex: .*unclosed character class"),
        ({"json_schema": "{"}, "json_schema: "),
        ({"json_schema": '{"type": "foo"}'}, "json_schema: .*Invalid type: foo"),
        ({"json_schema": '{"allOf": [{"type": "string"}, {"type": "integer"}]}'}, "json_schema: Unsatisfiable schema"),
        ({"grammar": 'start: "a" | b'}, 'grammar: .*unknown name: "b"'),
        ({"regex": "a", "grammar": "b"}, "exclude each other"),
        ({"regex": r"a[^\s\S]"}, "regex: no text matches it"),
        ({"grammar": "start: start"}, "grammar: no text matches it"),
    ],
)
def test_a_form_that_no_text_has_is_refused(model: DecoderLM, tokenizer: Tokenizer, given: dict[str, str], said: str) -> None:
    """Seen to fail: a regex or grammar of nothing gave empty texts, as if they were complete."""
    with pytest.raises(ConfigError, match=said):
        lm.generate(model, tokenizer, "a", **given)
