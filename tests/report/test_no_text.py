"""Runs whose labels are no text: their loss is told as it is, and not in bits per byte of anything."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.ablation.config import StudyConfig
from lm.ablation.study import new_study
from lm.ablation.variants import plain_config
from lm.cli.compose.compose import compose_config
from lm.errors import ConfigError
from lm.report.collect import collect
from lm.report.page import write_report
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


def test_their_report_and_comparison_tell_the_loss(tmp_path: Path, write_run: WriteRun) -> None:
    """Seen to fail: bits per byte led both."""
    folders = [without_bits(write_run(tmp_path / name, ffn=name, val_pearson=0.5)) for name in ("relu", "gelu")]
    page = write_report(folders[0]).read_text()
    assert "the validation loss is 3." in page and "bits per byte" not in page.replace("zlib_bits_per_byte", "")
    assert "nats per token" not in page and "0.5000" in page
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
