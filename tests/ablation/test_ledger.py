"""The ledger of all studies, and the schema of verdict.json: from configs and trees, with no run."""

import functools
import json
import os
from pathlib import Path

import pytest

from lm.ablation.config import StudyConfig
from lm.ablation.judging.verdict import verdict
from lm.ablation.judging.verdict_schema import Found
from lm.ablation.ledger import Ledger
from lm.ablation.study import Study, new_study
from lm.cli.compose.compose import compose_config
from lm.schema import Tree
from lm.training.config import TrainConfig
from tests.ablation.test_page import noisy, tree
from tests.conftest import unprivileged
from tests.training.conftest import TINY, settled

SCHEMA = Path(__file__).parents[2] / "docs" / "verdict.schema.json"
FFN = {"plain": ["model/ffn=swiglu"], "a": ["model/ffn=gelu"]}


@functools.cache
def composed(*overrides: str) -> TrainConfig:
    return compose_config(settled(*TINY, "data.files=text.txt", *overrides))


def asked(folder: Path, variants: dict[str, list[str]], *overrides: str) -> Study:
    config = StudyConfig(variants=variants, baseline=next(iter(variants)), seeds=5)
    return new_study(folder, config, {name: composed(*overrides, *own) for name, own in variants.items()})


def says(study: Study, seeds: int = 5, spread: float = 0.001) -> Tree:
    """What such a study could have found."""
    found = tree(noisy(list(study.variants), seeds, spread))
    return found | {"study": study.folder.name, "hash": study.hash}


def test_a_line_is_added_when_there_is_something_new_to_say(tmp_path: Path) -> None:
    study, ledger = asked(tmp_path / "studies/ffn", FFN), Ledger(tmp_path / "studies")
    lengths = []
    for seeds in (1, 2, 2, 5, 5, 2):
        ledger.note(study, says(study, seeds))
        lengths.append(len(ledger.entries()))
    assert lengths == [0, 1, 1, 2, 2, 3], "one pair says nothing; the same again is nothing new"
    lines = (tmp_path / "studies.jsonl").read_text().splitlines()
    line = json.loads(lines[1])
    assert (line["study"], line["hash"], line["baseline"], line["metric"]) == ("ffn", study.hash, "plain", "val_bits_per_byte")
    assert line["variants"]["a"] | {"config": ""} == {"overrides": FFN["a"], "config": "", "pairs": 5, "verdict": "no better"}
    assert line["variants"]["plain"]["verdict"] is None


def test_a_pair_that_was_asked_before_is_told_by_whatever_name(tmp_path: Path) -> None:
    ledger, first = Ledger(tmp_path), asked(tmp_path / "ffn", FFN)
    ledger.note(first, says(first))
    again = {"one": ["model/ffn=gelu"], "two": ["model/ffn=swiglu"]}
    (said,) = ledger.asked_before(asked(tmp_path / "again", again))
    assert said.startswith("two against one was asked in study ffn already: a against plain: no better, 5 pairs of val_bits_per_byte, 20")
    assert ledger.asked_before(first) == [], "of itself a study knows"
    assert ledger.asked_before(asked(tmp_path / "other", FFN, "data.seq_len=16")) == []
    assert ledger.asked_before(asked(tmp_path / "third", {"plain": ["model/ffn=swiglu"], "b": ["model/ffn=relu2"]})) == []


@pytest.mark.parametrize("torn", ['{"date": "2026-', "{}", "[1]", '{"date": 1}', "\udcff", '{"a": NaN}'])
def test_a_torn_line_costs_nothing_else(torn: str, tmp_path: Path) -> None:
    study, ledger = asked(tmp_path / "ffn", FFN), Ledger(tmp_path)
    ledger.note(study, says(study, 2))
    with ledger.path.open("ab") as file:
        file.write(os.fsencode(torn))
    assert len(ledger.entries()) == 1
    ledger.note(study, says(study, 5))
    assert [entry.variants["a"].pairs for entry in ledger.entries()] == [2, 5]


@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_a_study_stands_without_the_ledger_of_another_user(
    public: Path, mode: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Seen to fail: a study in a folder that several share ended in an error, without its verdicts, or did not begin."""
    study, ledger = asked(tmp_path / "ffn", FFN), Ledger(public / "studies")
    ledger.note(study, says(study, 2))
    public.chmod(0o755)
    ledger.path.chmod(mode if os.geteuid() == 0 else mode & 0o444 if mode == 0o644 else 0)
    with unprivileged():
        assert bool(ledger.asked_before(asked(tmp_path / "other", FFN))) == (mode == 0o644)
        ledger.note(study, says(study, 5))
    assert caplog.messages[-1].startswith(f"{ledger.path}: cannot be ") and caplog.messages[-1].endswith(
        "depends on this ledger of all studies."
    )
    ledger.path.chmod(0o644)
    assert [entry.variants["a"].pairs for entry in ledger.entries()] == [2]


def test_verdict_json_is_what_its_schema_says(tmp_path: Path) -> None:
    assert json.loads(SCHEMA.read_text()) == Found.model_json_schema(), "write it anew: tests/ablation/test_ledger.py"
    found = verdict(asked(tmp_path / "ffn", FFN))
    assert list(found) == list(Found.model_fields)
    assert Found(**found).tree() == found
    keys = [set(row) for row in found["variants"].values()]
    assert all(row == set(says(asked(tmp_path / "ffn", FFN))["variants"]["a"]) for row in keys), "trees of tests are as those of studies"
