"""A text on the command line is what was typed, whatever Hydra's grammar makes of it."""

import re
import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.cli.compose.compose import compose
from lm.cli.compose.overrides import expand, parse
from lm.cli.compose.quoting import hydra, quoted
from lm.errors import ConfigError
from lm.nn.transformer import DecoderConfig
from lm.schema import Config, find_field
from lm.training.config import TrainConfig
from tests.conftest import Lm

PRINTABLE = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), min_size=1, max_size=12)
AWKWARD = st.text(st.sampled_from("aü,'\"()[]{}=:#%~\\ $!`*?|&;<>@+-.0né"), min_size=1, max_size=12)
NAMES = ["/home/müller/x.txt", "a b", "it's", "a (1).txt", "a=b", "#a", "a%b", "~/x", "a\\b", "a\\\\b", "007", "{a:b}"]


def files(value: str) -> Any:
    """What the option holds where it was given so."""
    composition = compose(["data=text", f"data.files={value}"])
    return composition.layers[-1].values["data.files"]


def test_a_value_that_is_changed_is_read_as_it_was_the_next_time() -> None:
    """An override is parsed once a process."""
    found = hydra("x=[1,{a:[2]}]")
    assert found is not None and found is hydra("x=[1,{a:[2]}]")
    value: Any = found.value()
    value[1]["a"].append(3)
    assert found.value() == [1, {"a": [2]}]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_name_needs_no_quotes(name: str) -> None:
    assert files(name) == name
    assert files(f"[{name},b.txt]") == [name, "b.txt"]
    assert [files(job[0].partition("=")[2]) for job in expand([f"data.files={name},b.txt"])] == [name, "b.txt"]
    nested = compose(["data=mix", f"data.sources=[{{name:a,data:{{kind:text,files:{quoted(name)}}}}}]"]).layers[-1].values
    assert nested["data.sources"][0]["data"]["files"] == name


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.one_of(PRINTABLE, AWKWARD))
def test_any_printable_name_comes_out_the_same_unquoted_or_as_the_error_suggests(name: str) -> None:
    """Brackets around all of it make a list, and quotes around all of it are taken off; both are the same again in quotes."""
    assert files(quoted(name)) == name
    try:
        found = files(name)
    except ConfigError as error:
        if not name.strip():
            return
        suggested = re.search(r"for a text (.*)\.$", str(error))
        assert suggested, error
        [argument] = shlex.split(suggested.group(1))
        found = files(argument.partition("=")[2])
    assert found == name or (name.strip()[0] in "['\"" and name.strip()[-1] in "]'\"")


def test_a_list_is_cut_at_commas_outside_of_quotes_and_brackets() -> None:
    assert files("['a, b', c (1, 2), it's]") == ["a, b", "c (1, 2)", "it's"]
    assert files("[]]") == ["]"]


@pytest.mark.parametrize("name", ["{0}", "{a,b:c}", "{ }"])
def test_braces_that_hold_no_dict_are_letters(name: str) -> None:
    """Seen to end as a key that there is not."""
    assert files(quoted(name)) == files(name) == name


@pytest.mark.parametrize("dict_", ["{'match':'embed','lr':0.1}", '{"match": "embed", "lr": 0.1}', "{match:embed,lr:0.1}"])
def test_keys_of_a_dict_may_have_the_quotes_of_python_or_json(dict_: str) -> None:
    assert compose([f"optim.groups=[{dict_}]"]).layers[-1].values["optim.groups"] == [{"match": "embed", "lr": 0.1}]


def test_a_nested_value_takes_letters_beyond_ascii() -> None:
    sources = "[{name:a,data:{kind:text,files:/home/müller/x (1).txt}}]"
    found = compose(["data=mix", f"data.sources={sources}"]).layers[-1].values["data.sources"]
    assert found == [{"name": "a", "data": {"kind": "text", "files": "/home/müller/x (1).txt"}}]


@pytest.mark.parametrize("value", ["ü", "(", "1e-3)", "[[[" * 200, "9" * 6000])
def test_what_is_no_text_is_refused_by_its_type(lm: Lm, value: str) -> None:
    code, _, err = lm("train", f"seed={value}", "--cfg", "job")
    assert code == 2 and err.startswith("seed: ") and "does not fit. The value must be a valid integer" in err and len(err) < 300


DOUBLED = {
    "a key": (["seed=1", "seed=2"], "seed"),
    "a key in a sweep": (["seed=1,2", "seed=3", "-m"], "seed"),
    "a key with +": (["seed=1", "+seed=1"], "seed"),
    "a key set and deleted": (["seed=1", "~seed"], "seed"),
    "a group": (["model=tiny", "model=nano"], "model"),
    "a slot, written in two ways": (["model/ffn=geglu", "model/ffn=swiglu"], "model.ffn"),
    "a recipe": (["recipes=pretrain/tiny", "recipes=ablation/ffn"], "recipes"),
    "a key and its section": (["checkpoint={every: 7}", "checkpoint.every=8"], "checkpoint.every"),
    "a section and its key": (["checkpoint.every=7", "checkpoint={every: 8, keep_last: 1}"], "checkpoint.every"),
}


@pytest.mark.parametrize(("args", "path"), DOUBLED.values(), ids=DOUBLED.keys())
def test_what_is_said_twice_is_refused(lm: Lm, args: list[str], path: str) -> None:
    code, out, err = lm("train", *args, "--cfg", "job")
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"{re.escape(path)}: it was given twice, as .*\. Give it once\.\n", err)


EMPTY = [
    "run.dir=",
    "run.dir=''",
    "run.name=",
    "init_from=",
    "data.cache_dir=''",
    "tokenizer.specials=['']",
    "data.files=",
    "data.files=[]",
]
EMPTY += ["data.files=['']", "data.files=''", "trainer.freeze=['']", "seed=", "model="]
OTHERS = [["data", "show", "rows="], ["data", "show", "rows=[]"], ["compare", "a", "out="], ["export", "from=a", "format=hf", "out="]]


@pytest.mark.parametrize("args", [*(["train", "--cfg", "job", value] for value in EMPTY), *OTHERS, ["tokenizer", "out=t", "specials=['']"]])
def test_nothing_is_no_value(lm: Lm, args: list[str]) -> None:
    given = ["data=text"] if "data.files" in args[-1] else []
    code, out, err = lm(*args, *given)
    assert (code, out) == (2, "")
    assert re.search("no value was given|is empty|none was given|does not fit", err.splitlines()[-1]), err


def test_an_empty_prompt_is_one() -> None:
    assert compose(["trainer.sample_prompts=['',a]"]).config().trainer.sample_prompts == ["", "a"]


def integers(cls: type[Config], prefix: str = "") -> list[str]:
    """The paths of fields that hold an integer."""
    return [
        f"{prefix}{name}" for name, field in cls.model_fields.items() if str(field.annotation).replace(" | None", "") == "<class 'int'>"
    ]


WHOLE = ["seed", *integers(type(compose([]).config().trainer), "trainer."), *integers(type(compose([]).config().data), "data.")]
WHOLE += [*integers(DecoderConfig, "model."), "launch.devices", "checkpoint.every", "tokenizer.vocab_size"]


@pytest.mark.parametrize("path", WHOLE)
def test_an_integer_has_64_bits_at_most(path: str) -> None:
    assert find_field(TrainConfig, compose([]).tree, path.split("."))[1] is not None
    with pytest.raises(ConfigError, match=rf"^{path}: .* does not fit"):
        compose([f"{path}={2**63}"]).config()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["train", "--cfg", "job", "data.workers=100000"], "data.workers: 100000 does not fit"),
        (["train", "--cfg", "job", "launch.devices=100000", "data.global_batch=100000"], "launch.devices: 100000 does not fit"),
        (["train", "--cfg", "job", "launch.timeout_s=1000000000000"], "launch.timeout_s: 1000000000000 does not fit"),
        (["train", "--cfg", "job", "model.norm.eps=1e-300"], "model.norm.eps: 1e-300 does not fit"),
        (["generate", "from=a", "repetition_penalty=1e-300"], "repetition_penalty: 1e-300 does not fit"),
        (["generate", "from=a", "repetition_penalty=1e-30"], "repetition_penalty: 1e-30 does not fit"),
        (["generate", "from=a", "repetition_penalty=1e30"], "repetition_penalty: 1e+30 does not fit"),
        (["generate", "from=a", f"seed={2**63}"], "seed: a number of 64 bits does not fit"),
        (["generate", "from=a", "from=b"], "from: it was given twice"),
        (["tokenizer", "out=t", "specials=[a,a]"], "tokenizer.specials: 'a' is named twice"),
        (["tokenizer", "out=t", "specials=[a]", "specials=[b]"], "tokenizer.specials: it was given twice"),
    ],
)
def test_a_number_out_of_reach_and_a_key_of_a_verb_twice_are_refused(lm: Lm, args: list[str], said: str) -> None:
    code, out, err = lm(*args)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(said)


def test_names_that_are_not_utf8_are_refused_before_anything_is_read() -> None:
    with pytest.raises(ConfigError, match="text in UTF-8"):
        compose(["data=text", "data.files=a\udcff.txt"]).config()


def test_a_list_of_one_override_is_no_sweep() -> None:
    assert [item.value for item in parse(["data.seq_len=64"])] == [64]
