"""Preference pairs: the same prompt twice, and the answers alone learned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm.data.kinds import DPOConfig, PreferenceRecord, StdlibDocstringsConfig, TextConfig
from lm.data.rows.base import Rows
from lm.data.rows.build import build_rows
from lm.data.rows.parted import most_dropped
from lm.data.sources.docstrings import StdlibDocstringsSource
from lm.data.store.prepare import Prepared
from lm.errors import ConfigError
from lm.nn.batch import IGNORED
from lm.nn.model_config import ModelConfig

Prepare = Callable[..., Prepared]


def said(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]


def prepared(prepare_text: Prepare, path: Path, records: list[Any], record: PreferenceRecord | None = None) -> Prepared:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return prepare_text(path, record=record or PreferenceRecord(), val_frac=0.3)


def rows_of(found: Prepared, decoder: ModelConfig, seq_len: int = 96, split: str = "train") -> Rows:
    data = TextConfig(files="x", seq_len=seq_len, record=PreferenceRecord())
    return build_rows(DPOConfig(), data, found.train if split == "train" else found.val, found.tokenizer, decoder)


TEXTS = [{"prompt": f"which {n}", "chosen": f"good {n}", "rejected": f"quite bad {n}"} for n in range(60)]
ASKED = [("hello", "hi", f"which {n}") for n in range(60)]
MESSAGES = [{"chosen": said(*asked, f"good {n}"), "rejected": said(*asked, f"quite bad {n}")} for n, asked in enumerate(ASKED)]


@pytest.mark.parametrize("records", [TEXTS, MESSAGES])
def test_rows_are_the_prompt_with_each_answer_the_better_one_first(
    prepare_text: Prepare, tmp_path: Path, decoder: ModelConfig, records: list[Any]
) -> None:
    found = prepared(prepare_text, tmp_path / "a.jsonl", records, PreferenceRecord(prompt=None) if records is MESSAGES else None)
    rows = rows_of(found, decoder)
    batch = rows.batch(np.arange(len(rows)))
    assert batch.labels is not None and batch.step_tokens == len(rows) == len(batch.tokens) // 2
    decode = found.tokenizer.decode
    for row in range(0, len(batch.tokens), 2):
        learned = [batch.labels[row + side] for side in (0, 1)]
        better, worse = (decode(labels[labels != IGNORED].tolist()) for labels in learned)
        n = better.removeprefix("good ")
        assert worse == f"quite bad {n}"
        read = [batch.tokens[row + side][: int((labels != IGNORED).nonzero()[0])] for side, labels in enumerate(learned)]
        assert (
            read[0].tolist() == read[1].tolist()
            and decode(read[0].tolist()).startswith("User:\n")
            and f"which {n}" in decode(read[0].tolist())
        )


def test_a_validation_reads_both_answers_and_its_loss_is_of_the_better_one(
    prepare_text: Prepare, tmp_path: Path, decoder: ModelConfig
) -> None:
    found = prepared(prepare_text, tmp_path / "a.jsonl", TEXTS)
    batch = rows_of(found, decoder, split="val").batch(np.arange(3))
    labels = DPOConfig().measure(None).labels(batch)
    assert len(batch.tokens) == 6 and len(labels) == batch.step_tokens == 3
    assert all(found.tokenizer.decode(row[row != IGNORED].tolist()).startswith("good") for row in labels)


def test_pairs_that_do_not_fit_are_dropped_and_too_many_refused(prepare_text: Prepare, tmp_path: Path, decoder: ModelConfig) -> None:
    records = [*TEXTS, {"prompt": "long", "chosen": "x" * 90, "rejected": "y"}]
    found = prepared(prepare_text, tmp_path / "a.jsonl", records)
    splits = {split: rows_of(found, decoder, split=split).describe() for split in ("train", "val")}
    assert sum("1 of" in line for line in splits.values()) == 1
    with pytest.raises(ConfigError, match=r"data.seq_len=20: .* do not fit into a row, and at most \d may be dropped"):
        rows_of(found, decoder, seq_len=20)


@pytest.mark.parametrize(("n", "most"), [(9, 0), (20, 2), (63, 6), (400, 28), (2000, 120), (1_000_000, 50_447)])
def test_of_many_records_a_twentieth_may_be_dropped_and_of_few_some_more(n: int, most: int) -> None:
    assert most_dropped(n) == most


def test_answers_to_different_prompts_are_refused(prepare_text: Prepare, tmp_path: Path) -> None:
    records = [{"chosen": said("one", "a"), "rejected": said("two", "b")}]
    with pytest.raises(ConfigError, match=r"a.jsonl:1: fields 'chosen' and 'rejected' do not begin with the same messages"):
        prepared(prepare_text, tmp_path / "a.jsonl", records, PreferenceRecord(prompt=None))


@pytest.mark.slow  # reads the whole standard library
def test_the_first_paragraph_of_a_docstring_is_preferred_to_all_of_it(tmp_path: Path) -> None:
    record = PreferenceRecord(prompt="source", chosen="brief", rejected="target")
    documents = list(StdlibDocstringsSource(StdlibDocstringsConfig(record=record), tmp_path).documents())
    assert len(documents) > 1000
    for found in documents:
        *_, chosen, rejected = found.turns
        assert rejected.text.startswith(f"{chosen.text}\n\n")
