"""The default run name: one folder per run that differs, the same folder for the same run."""

import pytest

from lm.cli.compose.compose import compose


def name(*overrides: str) -> str:
    return compose(overrides).config().run.name


def test_name_is_the_recipe_and_the_sorted_overrides() -> None:
    assert name() == "pretrain-tiny"
    assert name("seed=1", "model/ffn=geglu") == "pretrain-tiny+model.ffn-geglu+seed-1"
    assert name("model/ffn=geglu", "seed=1", "recipes=ablation/ffn") == "ablation-ffn+model.ffn-geglu+seed-1"


def test_name_given_is_kept() -> None:
    assert name("seed=1", "run.name=mine") == "mine"


def test_same_value_written_differently_is_the_same_run() -> None:
    assert name("optim.lr=1e-3") == name("optim.lr=0.001") == name("optim.lr=3", "+optim.lr=1.0e-3")


@pytest.mark.parametrize(
    "override", ["logger=wandb", "run.dir=elsewhere", "trainer.device=cpu", "traceback=true", "checkpoint.every=5", "resume.mode=must"]
)
def test_where_and_how_does_not_enter_the_name(override: str) -> None:
    assert name(override) == name()


@pytest.mark.parametrize(
    "override", ["trainer.max_steps=99", "data.seq_len=64", "model.dropout=0.1", "~schedule.warmup_steps", "trainer.precision=bf16-mixed"]
)
def test_what_changes_the_outcome_enters_the_name(override: str) -> None:
    assert name(override) != name()


def test_name_needs_no_quotes_on_a_later_command_line() -> None:
    given = name("trainer.sample_prompts=['a = b, c/../d']", "data=text", "data.files=../some/where/notes.txt")
    assert compose([f"run.dir=runs/{given}"]).config().run.dir == f"runs/{given}"
    assert "/" not in given


def test_long_names_are_cut_and_still_differ() -> None:
    long = [f"trainer.sample_prompts=['{'x' * 300}{end}']" for end in "ab"]
    assert len({name(override) for override in long}) == 2
    assert all(len(name(override)) <= 120 for override in long)


def test_large_and_small_numbers_have_names_of_their_own() -> None:
    assert name("optim.lr=1e30") != name("optim.lr=1e-30")
