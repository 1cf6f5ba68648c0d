"""objective=regression and objective=multi_label: texts in rows, and the numbers that are told of them."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm.cli.views.rows import shown
from lm.data.kinds import CausalConfig, ClassifyConfig, LabelRecord, MultiLabelConfig, ObjectiveConfig, RegressionConfig, TextConfig
from lm.data.mixture import merged
from lm.data.rows.base import Rows
from lm.data.rows.build import build_rows
from lm.data.store.prepare import prepare
from lm.data.tokenizer.config import BytesConfig
from lm.errors import ConfigError
from lm.generation.decode import begin
from lm.generation.evaluate import Evaluator, OneRank
from lm.losses.targets import given
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import build_model
from tests.nn.models import config

LABELS = ["wet", "hot", "old"]
MANY = MultiLabelConfig(labels=LABELS)
NumberedRows = Callable[..., Rows]


def letters(n: int) -> str:
    """A text that tells its number by its length."""
    return "x" * (1 + n)


@pytest.fixture
def rows(tmp_path: Path) -> NumberedRows:
    def build(objective: ObjectiveConfig, labels: list[Any], told: list[str] | None = None, **options: Any) -> Rows:
        file = tmp_path / "a.jsonl"
        file.write_text("".join(json.dumps({"text": letters(i), "label": label}) + "\n" for i, label in enumerate(labels)))
        own: dict[str, Any] = {"files": str(file), "cache_dir": str(tmp_path / "cache"), "record": LabelRecord(), "val_frac": 0.0001}
        data = TextConfig(**(own | {"seq_len": 48} | options))
        prepared = prepare(data, BytesConfig(), log=lambda line: None)
        model = config() if told is None else config().replace(head=config().head.telling(told, bias=False, several=True))
        return build_rows(objective, data, prepared.parts[""].stores["train"], prepared.tokenizer, model)

    return build


def told_of(batch: Batch) -> dict[int, list[float]]:
    """By the length of each text, bos included, the numbers at its label."""
    assert batch.labels is not None and batch.documents is not None
    lengths = []
    for row, labels in zip(batch.documents, batch.labels, strict=True):
        lengths += [int((row == number).sum()) for number in row[labels != IGNORED].tolist()]
    return dict(zip(lengths, given(batch).tolist(), strict=True))


@pytest.mark.parametrize("packing", ["fit", "none"])
def test_the_number_of_a_text_is_at_its_label(rows: NumberedRows, packing: str) -> None:
    """As a number, or as text, as tables have it; one that is null is left out."""
    numbers = [round(0.37 * i - 2, 2) for i in range(30)]
    labels = [None, *(f" {number} " if i % 2 else number for i, number in enumerate(numbers))]
    found = rows(RegressionConfig(), labels, packing=packing)
    batch = found.batch(np.arange(len(found)))
    seen = told_of(batch)
    assert len(seen) == found.n_labels >= 28 and batch.labels is not None and (batch.labels <= 0).all()
    assert all(number == pytest.approx([numbers[length - 3]], abs=1e-6) for length, number in seen.items())
    assert "numbers from -2 to 8." in found.describe() and found.label_names() == ["score"]


@pytest.mark.parametrize("packing", ["fit", "none"])
def test_each_label_that_is_right_is_marked(rows: NumberedRows, packing: str) -> None:
    """By its name or number, in the model's order; one alone needs no list, and none may be right."""
    labels = [["wet", "old"], ["hot"], [], "old", [0, 2], 1, ["old", "wet", "hot"]] * 4
    expected = [[1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 1], [0, 1, 0], [1, 1, 1]] * 4
    turned = [2, 0, 1]
    for told, order in ((None, [0, 1, 2]), ([LABELS[i] for i in turned], turned)):
        found = rows(MANY, labels, told, packing=packing)
        seen = told_of(found.batch(np.arange(len(found))))
        assert len(seen) == found.n_labels >= 27
        assert all(marks == [expected[length - 2][i] for i in order] for length, marks in seen.items())
    assert "1.37 labels in each, 'old' in 55.6% of them" in found.describe()


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_labels_may_have_a_field_each(tmp_path: Path, ending: str) -> None:
    """As 0 and 1, or as false and true, in a table False and True; a text of which one is not known is left out."""
    marks = [[1, 0, 1], [0, 1, 0], [0, 0, 0], [None, 0, 1]] * 8
    file = tmp_path / f"a.{ending}"
    if ending == "csv":
        told = [["" if mark is None else str(mark if i % 2 else bool(mark)) for mark in row] for i, row in enumerate(marks)]
        lines = ["text,wet,hot,old", *(",".join([letters(i), *row]) for i, row in enumerate(told))]
    else:
        told = [[mark if i % 2 else mark and bool(mark) for mark in row] for i, row in enumerate(marks)]
        lines = [json.dumps({"text": letters(i), **dict(zip(LABELS, row, strict=True))}) for i, row in enumerate(told)]
    file.write_text("\n".join(lines))
    seen = marked(file, LABELS)
    known = {n + 2: row for n, row in enumerate(marks) if None not in row}
    assert 20 < len(seen) < len(known) + 1 and all(row == known[length] for length, row in seen.items())
    with pytest.raises(ConfigError, match=r"field 'cold' is missing; the fields are text, wet, hot, old\. Set data.record.label"):
        marked(file, [*LABELS, "cold"])
    with pytest.raises(ConfigError, match=r"label has the field 'wet' twice, and each is a label\. Name it once"):
        marked(file, [*LABELS, "wet"])
    file.write_text(lines[0] + "\n" + re.sub("1|[Tt]rue", "2", lines[1]))
    with pytest.raises(ConfigError, match=r"field '(wet|hot)' holds .*2.*, and a field for each label holds 1 or true, or 0 or false"):
        marked(file, LABELS)


def marked(file: Path, fields: list[str]) -> dict[int, list[float]]:
    data = TextConfig(files=str(file), cache_dir=str(file.parent / "cache"), record=LabelRecord(label=fields), val_frac=0.0001, seq_len=48)
    prepared = prepare(data, BytesConfig(), log=lambda line: None)
    found = build_rows(MANY, data, prepared.parts[""].stores["train"], prepared.tokenizer, config())
    return told_of(found.batch(np.arange(len(found))))


@pytest.mark.parametrize(
    ("objective", "label", "said"),
    [
        (RegressionConfig(), "good", "label 'good' of the train split is no number. .* objective=classify"),
        (RegressionConfig(), ["a"], "is no number. .* objective=multi_label"),
        (RegressionConfig(), "nan", "label 'nan' of the train split is no number"),
        (RegressionConfig(), "1e99", "label '1e99' of the train split is no number"),
        (MANY, ["0.5"], r"the label '0.5' .* is not in objective.labels=\[wet,hot,old\].* or set objective=regression for numbers"),
        (MANY, ["wet", "dry"], r"the label 'dry' of .* is not in objective.labels=\[wet,hot,old\].* of this split are \[dry,hot,wet\]"),
        (MANY, 3, "the label '3' of"),
        (MANY, [0, 1, 0], "has one twice; .*, not 0 or 1 for each"),
        (MANY, [None], "neither a name, nor a number, nor a list of names"),
        (MANY, [["wet"]], "neither a name, nor a number, nor a list of names"),
        (MANY, [""], "neither a name, nor a number, nor a list of names"),
    ],
)
def test_what_is_no_number_or_label_is_refused(rows: NumberedRows, objective: ObjectiveConfig, label: Any, said: str) -> None:
    fine: list[Any] = [1.5] if isinstance(objective, RegressionConfig) else [["wet"], "hot"]
    with pytest.raises(ConfigError, match=said):
        rows(objective, [*fine * 25, label])


def test_a_0_or_1_for_each_of_two_labels_is_refused(rows: NumberedRows) -> None:
    """Seen to be read as the numbers of both, in whatever text."""
    two = MultiLabelConfig(labels=["wet", "hot"])
    with pytest.raises(ConfigError, match=r"is of all labels, as every other is; .*, not 0 or 1 for each"):
        rows(two, [[0, 1], [1, 0]] * 20)
    assert "2.00 labels" not in rows(two, [[0, 1], [1, 0], [1]] * 20).describe()


def test_batches_of_several_sources_keep_their_numbers(rows: NumberedRows) -> None:
    """Seen to fail: they were left out."""
    found = rows(RegressionConfig(), [i / 2 for i in range(20)])
    parts = [found.batch(np.array([0, 2])), found.batch(np.array([1]))]
    whole = merged(parts, [np.array([0, 2]), np.array([1])], pad=0)
    assert told_of(whole) == told_of(found.batch(np.array([0, 1, 2]))) and given(whole).shape[1] == 1


@pytest.mark.usefixtures("doubles")  # ranks read other batches, whose products round otherwise, and a correlation is of differences
@pytest.mark.parametrize("objective", [RegressionConfig(), MANY], ids=["regression", "multi_label"])
def test_figures_are_sums_over_ranks(rows: NumberedRows, objective: ObjectiveConfig) -> None:
    """Of which one has a batch fewer, and makes up for it by one that does not count."""
    labels = [i / 3 if objective.kind == "regression" else [LABELS[i % 3]] for i in range(20)]
    cfg, found = objective.headed(config(vocab_size=320, max_seq_len=48)), rows(objective, labels, packing="none")
    ids, whole = np.arange(9), Evaluator(build_model(cfg, seed=0), BytesConfig().build(), 2, objective.measure(None))
    each = []
    for rank in range(2):
        alone = OneRank()
        alone.rank, alone.world = rank, 2
        each.append(replace(whole, ranks=alone).totals(found, ids, closely=True))
    total = whole.totals(found, ids, closely=True)
    figures = total.figures()
    assert (each[0] + each[1]).figures() == pytest.approx(figures) and "val_bits_per_byte" not in figures
    assert ("val_pearson" in figures, "val_ece" in figures) == ((True, False) if objective.kind == "regression" else (False, True))


def test_rows_are_shown_with_what_is_told(rows: NumberedRows) -> None:
    for objective, label, said in ((RegressionConfig(), 2.5, "2.5"), (MANY, ["wet", "old"], "[wet, old]"), (MANY, [], "[]")):
        found = rows(objective, [label] * 9, packing="none")
        *_, says = shown(found.batch(np.array([0])), BytesConfig().build(), found.label_names())
        assert says[-1][0].removeprefix("│") == said


def test_equal_guesses_have_no_correlation() -> None:
    """Seen to fail: rounding left a spread, and a correlation of 1e-8."""
    loss = RegressionConfig().loss()
    numbers = torch.rand(1000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for guess in (0.1, 0.3, 1.7, 1e3 / 7, 1e6 / 3):
        guesses = torch.full_like(numbers, guess)
        assert loss.figures(loss.counts(guesses, numbers)) == loss.figures(loss.counts(numbers, guesses)) == {"pearson": 0.0}
    near = 1e3 + numbers
    assert loss.figures(loss.counts(near, numbers))["pearson"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("objective", "does", "remedy"),
    [
        (RegressionConfig(), "tells a number of a text", "model.head.labels=null for a new head"),
        (MANY, "tells which labels are right of a text", "model.head.labels=null model.head.several=false for a new head"),
        (ClassifyConfig(labels=["wet", "hot"]), "tells texts apart", "model.head.labels=null for a new head"),
    ],
)
def test_a_model_that_tells_something_of_texts_continues_none(objective: ObjectiveConfig, does: str, remedy: str) -> None:
    """Seen to fail: a regression told texts apart, and the remedy for several labels was refused in turn."""
    model = objective.headed(config(vocab_size=40))
    with pytest.raises(ConfigError, match=f"the model {does} and continues none. Use lm classify"):
        begin(build_model(model), [1])
    with pytest.raises(ValueError, match=f"objective=causal predicts tokens, and the model {does} .* Set {remedy}"):
        CausalConfig().headed(model)
    new = dict(key.removeprefix("model.head.").split("=") for key in remedy.split() if "=" in key)
    head = model.head.replace(**{key: json.loads(value) for key, value in new.items()})
    assert CausalConfig().headed(model.replace(head=head)).head.labels is None
