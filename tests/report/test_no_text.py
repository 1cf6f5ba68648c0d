"""Runs whose labels are no text: their loss is told as it is, in its own unit, and not in bits per byte of anything."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.ablation.config import StudyConfig
from lm.ablation.study import new_study
from lm.ablation.variants import plain_config
from lm.cli.compose.compose import compose_config
from lm.data.kinds import ObjectiveConfig
from lm.errors import ConfigError
from lm.report.collect import collect
from lm.report.page import write_report
from lm.schema import from_tree
from lm.training.config import TrainConfig

WriteRun = Callable[..., Path]
CLASSIFY = ("data=labels", "data.files=a.jsonl", "objective=classify", "objective.labels=[a,b]")
KINDS: dict[str, tuple[list[str], list[str]]] = {
    "classify": ([*CLASSIFY], ["test_error", "test_ece"]),
    "multi_label": ([*CLASSIFY[:2], "objective=multi_label", "objective.labels=[a,b]"], ["test_error", "test_ece"]),
    "regression": ([*CLASSIFY[:2], "objective=regression"], ["test_mae"]),
    "reward": (["data=preferences", "data.files=a.jsonl", "objective=reward"], ["test_error", "test_ece"]),
}


def without_bits(folder: Path) -> Path:
    """A run as those of labels leave it."""
    for name in ("metrics.jsonl", "summary.json"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        kept: list[dict[str, Any]] = [{key: value for key, value in line.items() if key != "val_bits_per_byte"} for line in lines]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in kept))
    return folder


def learning(kind: str, folder: Path) -> Path:
    """A run with this objective."""
    config = folder / "config.yaml"
    config.write_text(config.read_text() + f"objective:\n  kind: {kind}\n")
    return folder


def test_their_report_and_comparison_tell_the_loss(tmp_path: Path, write_run: WriteRun) -> None:
    """Seen to fail: bits per byte led both."""
    runs = [without_bits(write_run(tmp_path / name, ffn=name, val_pearson=0.5)) for name in ("relu", "gelu")]
    folders = [learning("regression", run) for run in runs]
    page = write_report(folders[0]).read_text()
    assert "the validation loss is 3." in page and "bits per byte" not in page.replace("zlib_bits_per_byte", "")
    assert "nats/token" not in page and "nats per token" not in page and "0.5000" in page
    found = collect(folders)
    assert found.metric == "val_loss" and found.told == {"val Pearson": "val_pearson"}


def test_tokenizers_may_differ_where_labels_are_no_text(tmp_path: Path, write_run: WriteRun) -> None:
    """A loss of a label does not depend on them. Seen to fail: said to be per token, and not comparable."""
    folders = [write_run(tmp_path / name) for name in ("a", "b")]
    config = folders[1] / "config.yaml"
    config.write_text(config.read_text().replace("vocab_size: 4096", "vocab_size: 512"))
    assert not any("tokenizers differ" in note for note in collect([without_bits(folder) for folder in folders]).notes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_study_compares_by_their_loss_and_by_what_they_tell(kind: str) -> None:
    """Seen to fail: by bits per byte, which were the loss times a number."""
    asked, told = KINDS[kind]
    cfg: TrainConfig = compose_config(["data.test_frac=0.5", *asked])
    for metric in ("test_bits_per_byte", "val_bits_per_byte"):
        with pytest.raises(ConfigError, match=rf"{metric}: objective={kind} learns no text.* Say one of test_loss, .*{told[0]}"):
            plain_config("a", cfg, metric)
    for metric in ("test_loss", "val_loss", *told):
        plain_config("a", cfg, metric)
    with pytest.raises(ConfigError, match="tells such a figure"):
        plain_config("a", cfg, "test_margin")


def test_variants_with_other_tokenizers_are_compared_by_the_loss_of_labels(tmp_path: Path) -> None:
    variants = {name: ["tokenizer.kind=" + name] for name in ("bytes", "unigram")}
    asked = StudyConfig(variants=variants, baseline="bytes", metric="test_loss", tune="optim.lr")
    configs = {name: compose_config([*CLASSIFY, f"tokenizer={name}", "optim=adamw"]) for name in variants}
    assert {job.metric for job in new_study(tmp_path / "study", asked, configs).missing()} == {"val_loss"}
    with pytest.raises(ConfigError, match="is per token"):
        new_study(tmp_path / "text", asked, {name: compose_config([f"tokenizer={name}", "optim=adamw"]) for name in variants})


UNITS = {
    "classify": {"loss": "nats/label", "test_loss/512": "nats/label", "val_label_loss": "nats/label", "test_error": "no unit"},
    "multi_label": {"loss": "nats/label", "val_loss": "nats/label"},
    "regression": {"loss": "squared error", "test_loss": "squared error", "test_mae": "absolute error"},
    "reward": {"loss": "nats/pair", "test_loss": "nats/pair"},
    "contrastive": {"loss": "nats/pair", "val_loss": "nats/pair", "val_similarity": "cosine"},
    "dpo": {"loss": "nats/pair", "val_pair_loss": "nats/pair", "test_loss": "nats/token", "test_bits_per_byte/512": "bits/byte"},
    "ipo": {"loss": "squared nats/token", "val_loss": "nats/token"},
    "apo": {"loss": "per pair", "val_pair_loss": "per pair", "val_loss": "nats/token"},
    "kto": {"loss": "per answer", "test_answer_loss": "per answer", "val_loss": "nats/token", "val_good_gain": "nats/answer"},
    "sft": {"loss": "nats/token", "val_label_loss": "nats/token of answers"},
    "causal": {"loss": "nats/token", "val_loss/code": "nats/token", "test_own_entropy": "nats/token", "test_ece/512": "no unit"},
}


@pytest.mark.parametrize("kind", UNITS)
def test_each_objective_says_in_which_units_its_figures_are(kind: str) -> None:
    """Seen to fail: whatever ended in loss was in nats/token."""
    measure = from_tree(ObjectiveConfig.kinds()[kind], {"kind": kind}).measure(None)
    assert {metric: measure.unit(metric) for metric in UNITS[kind]} == UNITS[kind]


LEARNED = [("regression", "val_loss", "squared error"), ("kto", "val_answer_loss", "per answer")]


@pytest.mark.parametrize(("kind", "figure", "told"), LEARNED)
def test_the_page_of_a_run_tells_the_unit_and_draws_the_loss_that_is_learned(
    kind: str, figure: str, told: str, tmp_path: Path, write_run: WriteRun
) -> None:
    """Seen to fail: the loss of a regression had none; and a run whose objective had an option that is gone had no page."""
    folder = learning(f"{kind}\n  gone: 3", write_run(tmp_path / "run"))
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("val_loss", figure).replace("val_bits_per_byte", "val_other"))
    page = write_report(folder).read_text()
    chart = page.partition("Loss, ")[2].partition("</svg>")[0]
    assert chart.startswith(told) and "validation" in chart


def test_losses_of_two_objectives_are_said_not_to_compare(tmp_path: Path, write_run: WriteRun) -> None:
    """Seen to fail: a reward model stood before DPO, whose loss is of tokens."""
    said = "Not comparable: the objectives differ"
    folders = [learning(kind, write_run(tmp_path / kind)) for kind in ("dpo", "reward")]
    assert not any(note.startswith(said) for note in collect([without_bits(folders[1])]).notes)
    assert any(note.startswith(said) for note in collect(folders).notes)
    among = [learning(f"contrastive\n  among: {n}", without_bits(write_run(tmp_path / str(n)))) for n in (8, 16)]
    assert any(note.startswith(said) for note in collect(among).notes)


TWO = ["data=alike", "data.files=a.jsonl", "data.test_frac=0.5"]
ONE = ["data=preferences", "data.files=a.jsonl", "data.test_frac=0.5"]
DIFFERENT: dict[str, tuple[str, list[str], str]] = {
    "two losses": ("test_pair_loss", ["objective=simpo", "objective=orpo"], "Say metric=test_error"),
    "an option of the loss": ("test_pair_loss", ["objective=simpo", "objective=simpo objective.beta=1.5"], "Say metric=test_error"),
    "a temperature": ("test_loss", ["objective=contrastive", "objective=contrastive objective.temperature=1"], "Say metric=test_error"),
    "answers and pairs": ("test_loss", ["objective=simpo", "objective=reward"], "Say metric=test_error"),
}


@pytest.mark.parametrize("which", DIFFERENT)
def test_losses_that_mean_other_things_are_not_judged(which: str, tmp_path: Path) -> None:
    """Seen to fail: a reward model was better than DPO by 7.66."""
    metric, given, remedy = DIFFERENT[which]
    configs = {name: compose_config([*(TWO if "contr" in each else ONE), *each.split()]) for name, each in zip("ab", given, strict=True)}
    asked = StudyConfig(variants={"a": [], "b": []}, baseline="a", metric=metric)
    with pytest.raises(ConfigError, match=rf"metric={metric} is another figure in variants.b than in a, .* {remedy}\."):
        new_study(tmp_path / "study", asked, configs)
    tuned = new_study(tmp_path / "right", asked.replace(metric="test_error", tune="optim.lr"), configs).missing()
    assert {job.metric for job in tuned} == {"val_loss" if metric == "test_loss" else "val_pair_loss"}


def test_choices_among_more_texts_are_never_compared_with_those_among_fewer(tmp_path: Path) -> None:
    configs = {name: compose_config([*TWO, "objective=contrastive", f"objective.among={n}"]) for name, n in (("a", 8), ("b", 16))}
    for metric in ("test_loss", "test_error"):
        asked = StudyConfig(variants={"a": [], "b": []}, baseline="a", metric=metric)
        with pytest.raises(
            ConfigError, match=f"metric={metric} is another figure in variants.b than in a, .* Vary one objective at a time"
        ):
            new_study(tmp_path / metric, asked, configs)


def test_pairs_are_judged_by_their_errors_whatever_their_tokens(tmp_path: Path) -> None:
    configs = {name: compose_config([*ONE, "objective=simpo", f"tokenizer={name}"]) for name in ("bytes", "bpe")}
    asked = StudyConfig(variants={"bytes": [], "bpe": []}, baseline="bpe", metric="test_error")
    assert {job.metric for job in new_study(tmp_path / "study", asked, configs).missing()} == {"test_error"}
    with pytest.raises(ConfigError, match="is per token"):
        new_study(tmp_path / "loss", asked.replace(metric="test_pair_loss"), configs)
