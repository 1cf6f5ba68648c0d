"""`lm explain`: description, type, default, and where the value comes from."""

import re

import pytest

from tests.conftest import Lm

KEY = "model.attention.n_kv_heads"


@pytest.mark.parametrize(
    ("args", "value", "source"),
    [
        (["model=gpt2", "model/attention=gqa"], "null", "class default, GQAConfig"),
        ([], "2", "preset, "),
        (["model/attention=mqa"], "1", "option, "),
        ([f"{KEY}=4"], "4", f"command line, {KEY}=4"),
    ],
)
def test_value_comes_from_the_strongest_place_that_states_it(lm: Lm, args: list[str], value: str, source: str) -> None:
    code, out, _ = lm("explain", KEY, *args)
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("  ")}
    assert code == 0
    assert lines["type"].startswith("int > 0") and lines["type"].endswith(", or null")
    assert lines["default"] == "null"
    assert lines["value"] == value
    assert lines["from"].startswith(source)
    assert "Number of key and value heads" in out


@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("model.d_model", "conf/model/tiny.yaml"),
        ("model.ffn.gated", "conf/model/ffn/swiglu.yaml"),
        ("trainer.max_steps", "recipes/pretrain/tiny.yaml"),
        ("schedule.final_frac", "conf/schedule/wsd.yaml"),
    ],
)
def test_a_source_in_a_file_is_named_by_its_path(lm: Lm, key: str, file: str) -> None:
    _, out, _ = lm("explain", key)
    [line] = [line for line in out.splitlines() if line.startswith("  from")]
    assert line.endswith(file)


def test_value_from_the_recipe_shows_what_it_replaced(lm: Lm) -> None:
    _, out, _ = lm("explain", "optim.lr", "recipes=pretrain/gpt2_124m", "optim.lr=1.0")
    earlier = [line for line in out.splitlines() if "instead of" in line]
    assert ["recipe" in earlier[0], "option" in earlier[1], "class default" in earlier[2]] == [True, True, True]


@pytest.mark.parametrize(
    ("word", "taken", "says"),
    [
        ("swiglu", "model/ffn=swiglu", "model.ffn.gated"),
        ("both", "model.pattern=[both]", "model.pattern"),
        ("muon", "optim=muon", "optim.momentum"),
    ],
)
def test_a_value_alone_will_do_where_one_setting_has_it(lm: Lm, word: str, taken: str, says: str) -> None:
    code, out, err = lm("explain", word)
    assert (code, f"{word}: {taken} is taken." in err, says in out) == (0, True, True)


def test_of_a_value_that_several_settings_have_all_are_named(lm: Lm) -> None:
    code, _, err = lm("explain", "single")
    assert (code, err.strip()) == (
        2,
        "explain: single is a value of model/block and strategy. Write lm explain model/block model/block=single.",
    )


def test_a_section_lists_its_options_and_every_field(lm: Lm) -> None:
    code, out, _ = lm("explain", "model/ffn")
    assert code == 0
    assert "model/ffn=swiglu; options: beside, deepseek_moe, geglu" in out
    for field in ["model.ffn.hidden", "model.ffn.activation", "model.ffn.gated", "model.ffn.bias", "model.ffn.dropout"]:
        assert field in out


@pytest.mark.parametrize(("given", "kind"), [([], "plain"), (["model=albert_base"], "loop"), (["model/residual=x0"], "x0")])
def test_where_no_option_is_chosen_the_kind_is_told_that_holds(lm: Lm, given: list[str], kind: str) -> None:
    """A preset may name one, as ALBERT's does."""
    assert f"  model/residual={kind}; options: dense, " in lm("explain", "model.residual", *given)[1]
    lines = lm("train", "--help", *given)[1].splitlines()
    assert f"  model/residual=  [{kind}]" in lines and "  model/recurrent=  [null]" in lines


def test_a_value_that_must_be_set_is_said_to_be_missing(lm: Lm) -> None:
    code, out, _ = lm("explain", "data.files", "data=text")
    assert code == 0
    assert "must be set" in out
    assert "set data.files=..." in out


KINDS = {
    "data.files": (["data.seq_len=64"], ["data=text"]),
    "adapter.rank": ([], ["adapter=lora"]),
    "data.record.user": ([], ["data=arithmetic", "data.record.kind=chat"]),
}


@pytest.mark.parametrize("key", KINDS)
def test_a_key_of_a_kind_that_is_not_chosen_is_told_of_one_that_has_it(lm: Lm, key: str) -> None:
    overrides, taken = KINDS[key]
    code, out, err = lm("explain", key, *overrides)
    assert (code, out.splitlines()[0]) == (0, key)
    assert [line for line in err.splitlines() if "is taken" in line] == [f"{key}: {each} is taken, which has this key." for each in taken]


def test_a_key_of_another_kind_than_that_of_the_command_line_is_refused(lm: Lm) -> None:
    code, _, err = lm("explain", "optim.adam_lr", "optim=adamw")
    assert code == 2 and "only in others. Write optim=muon" in err


@pytest.mark.parametrize(
    ("overrides", "value"), [([], "0"), (["seed=4"], "4"), (["seed.data=3"], "0"), (["seed.init=3", "seed.data=1"], "3")]
)
def test_a_seed_alone_speaks_for_each_of_its_parts(lm: Lm, overrides: list[str], value: str) -> None:
    _, out, _ = lm("explain", "seed.init", *overrides)
    assert re.search(rf"^  value +{value}$", out, re.MULTILINE)
    _, out, _ = lm("explain", "seed", *overrides)
    assert re.search(rf"^  (seed.init|value) +{value}\b", out, re.MULTILINE)


@pytest.mark.parametrize(("key", "near"), [("model.attention.n_kv_head", KEY), ("optm", "optim"), ("n_kv_heads", KEY)])
def test_misspelt_path_is_answered_with_the_nearest(lm: Lm, key: str, near: str) -> None:
    code, out, err = lm("explain", key)
    assert (code, out) == (2, "")
    assert f"Did you mean '{near}'?" in err


def test_what_a_switched_option_left_out_is_told(lm: Lm) -> None:
    _, _, err = lm("explain", "optim.lr", "recipes=pretrain/gpt2_124m", "optim=muon")
    assert "left out optim.lr" in err


def test_a_kind_is_told_with_all_there_are(lm: Lm) -> None:
    """Seen to fail: an empty line. Of this process, other tests may have added some."""
    for section, kinds in (("model.norm", {"layer", "rms"}), ("model.position.scaling", {"dynamic", "linear", "yarn"})):
        said = lm("explain", f"{section}.kind")[1].splitlines()[1]
        assert said.startswith(f"  Which kind {section} is: ") and kinds <= set(said.rstrip(".").partition(": ")[2].split(", "))
