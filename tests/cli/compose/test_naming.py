"""The default run name: one folder per run that differs, the same folder for the same run."""

import re

import pytest

from lm.ablation.config import NAME
from lm.cli.compose import catalog
from lm.cli.compose.compose import compose
from lm.cli.compose.naming import job_names, short, told_apart, variant_names
from lm.cli.compose.overrides import expand


def name(*overrides: str) -> str:
    return compose(overrides).config().run.name


def test_name_is_the_recipe_and_the_sorted_overrides() -> None:
    assert name() == "pretrain-tiny"
    assert name("seed=1", "model/ffn=geglu") == "pretrain-tiny+ffn-geglu+seed-1"
    assert name("model/ffn=geglu", "seed=1", "recipes=ablation/ffn") == "ablation-ffn+ffn-geglu+seed-1"


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


def sweep(*overrides: str) -> list[tuple[str, str]]:
    """The label and the folder of each job."""
    jobs = expand(overrides)
    runs = [compose(job).config().run for job in told_apart(jobs)]
    return [(label, str(run.folder)) for label, run in zip(job_names(jobs), runs, strict=True)]


def test_jobs_of_a_sweep_are_named_by_what_differs_and_constants_stay_in_the_config() -> None:
    given = ["model=nano", "data.seq_len=64", "seed=1", "optim.lr=0.003,0.01", "model.attention.qk_norm=head,none"]
    assert sweep(*given)[:2] == [
        ("lr=0.003 qk_norm=head", "runs/pretrain-nano+lr-0.003+qk_norm-head"),
        ("lr=0.003 qk_norm=none", "runs/pretrain-nano+lr-0.003+qk_norm-none"),
    ]
    assert compose(told_apart(expand(given))[0]).config().data.seq_len == 64


def test_a_name_given_to_a_sweep_is_the_folder_of_its_runs() -> None:
    assert [folder for _, folder in sweep("run.name=pos", "model/position=rope,alibi")] == [
        "runs/pos/position-rope",
        "runs/pos/position-alibi",
    ]
    assert [folder for _, folder in sweep("run.name=a,b", "run.dir=x y")] == ["x y/a", "x y/b"]
    assert sweep("run.name=a,b", "seed=0,1")[3][1] == "runs/b/seed-1"
    assert sweep("run.name=mine", "seed=0") == [("run.name=mine seed=0", "runs/mine")]


def test_several_loggers_leave_the_names_of_a_sweep_as_they_are() -> None:
    given = ["model=nano", "seed=0,1", "optim.lr=0.003"]
    assert sweep("logger=[csv,tensorboard,wandb]", *given) == sweep(*given)


@pytest.mark.parametrize(
    "values",
    ["data.files=ä.txt,ö.txt", "data.files=a b.txt,a-b.txt", "trainer.sample_prompts=['" + "x" * 300 + "a'],['" + "x" * 300 + "b']"],
)
def test_names_of_a_sweep_are_distinct_whatever_is_left_out_of_them(values: str) -> None:
    folders = [
        folder for _, folder in sweep("data=text", "data.val_files=v.txt", *(["data.files=x"] if "prompts" in values else []), values)
    ]
    assert len(set(folders)) == 2 and all(len(folder) <= 125 for folder in folders)


def test_a_key_is_as_short_as_no_other_ends() -> None:
    assert [short(key) for key in ("optim.lr", "model.norm.eps", "model.ffn", "data.seq_len", "seed", "model.dropout", "mine.own.key")] == [
        "lr", "norm.eps", "ffn", "data.seq_len", "seed", "model.dropout", "mine.own.key"
    ]  # fmt: skip


def test_the_default_recipe_is_named_after_the_model_that_it_trains() -> None:
    assert (name("model=nano"), name("model=tiny")) == ("pretrain-nano", "pretrain-tiny")
    assert "pretrain/moe_tiny" in catalog.groups()["recipes"] and name("model=moe_tiny") == "pretrain-tiny+model-moe_tiny"
    assert name("model=nano", "recipes=ablation/ffn") == "ablation-ffn+model-nano"


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        (["model/ffn=swiglu,gelu", "seed=1"], ["swiglu", "gelu"]),
        (["optim.lr=1e-3,1e30"], ["0.001", "1e30"]),
        (["optim.lr=1,2", "model/ffn=geglu,gelu"], ["ffn-geglu+lr-1", "ffn-gelu+lr-1", "ffn-geglu+lr-2", "ffn-gelu+lr-2"]),
        (["data.files=ä,ö"], None),
        (["data.files=a b,a-b"], None),
        (["data.files=_a,a,.a"], None),
        (["data.files=" + "x" * 300 + "1," + "x" * 300 + "2"], None),
    ],
)
def test_each_variant_has_a_name_of_its_own_that_a_folder_can_have(sweep: list[str], expected: list[str] | None) -> None:
    jobs = expand(sweep)
    named = variant_names(jobs)
    assert len(named) == len(jobs) and (expected is None or list(named) == expected)
    assert all(re.fullmatch(NAME, name) for name in named)
    assert all(set(own) <= set(job) for own, job in zip(named.values(), jobs, strict=True))
