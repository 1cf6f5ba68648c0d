"""objective=contrastive: groups of pairs in rows, and the records that they are made of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm.data.kinds import AlikeRecord, ContrastiveConfig, TextConfig
from lm.data.rows.base import Rows
from lm.data.rows.build import build_rows
from lm.data.store.prepare import prepare
from lm.data.tokenizer.config import BytesConfig
from lm.errors import ConfigError
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import EncoderConfig
from lm.schema import from_tree
from lm.testing.models import BASE
from tests.nn.models import config, with_kinds

AlikeRows = Callable[..., Rows]
ENCODER = from_tree(EncoderConfig, with_kinds(BASE | {"kind": "encoder"}))


@pytest.fixture
def rows(tmp_path: Path) -> AlikeRows:
    def build(records: list[Any], among: int = 4, model: Any = None, record: AlikeRecord | None = None, **options: Any) -> Rows:
        file = tmp_path / "a.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in records))
        own: dict[str, Any] = {"files": str(file), "cache_dir": str(tmp_path / "cache"), "record": record or AlikeRecord()}
        data = TextConfig(**(own | {"seq_len": 32, "val_frac": 0.0001} | options))
        prepared = prepare(data, BytesConfig(), log=said.append)
        return build_rows(ContrastiveConfig(among=among), data, prepared.parts[""].stores["train"], prepared.tokenizer, model or config())

    said.clear()
    return build


said: list[str] = []


def texts(batch: Batch) -> list[str]:
    """The texts of a batch's rows."""
    assert batch.positions is not None
    return [bytes(t for t in row[at >= 0].tolist() if t < 256).decode() for row, at in zip(batch.tokens, batch.positions, strict=True)]


def pair(i: int) -> dict[str, str]:
    return {"anchor": f"first {i}", "positive": f"second {i}"}


def test_a_row_is_a_group_and_every_pair_comes_once_an_epoch(rows: AlikeRows) -> None:
    found = rows([pair(i) for i in range(31)])
    n = int(found.describe().removeprefix("train: ").split()[0])  # of the 31, those that are not held out
    assert 4 * len(found) <= n < 4 * len(found) + 4
    seen = texts(found.batch(np.arange(n)))  # n groups of 4 are 4 epochs
    firsts, seconds = ([seen[start : start + 4] for start in range(at, len(seen), 8)] for at in (0, 4))
    assert [[each.replace("first", "second") for each in group] for group in firsts] == seconds
    order = [each for group in firsts for each in group]
    epochs = {tuple(order[start : start + n]) for start in range(0, 4 * n, n)}
    assert len(epochs) == 4 and all(len({*epoch}) == n for epoch in epochs)
    assert found.at(0, range(6, 8)).tolist() == [6, 7]
    few = [sorted(found.at(0, range(2 * step, 2 * step + 2), first=2).tolist()) for step in range(4)]
    assert all(each == few[0] for each in few) and len({*few[0]}) == 2


def test_the_label_is_the_number_of_an_anchor_where_its_vector_is(rows: AlikeRows) -> None:
    records = [pair(i) | {"negative": "no"} for i in range(20)]
    for model, at in ((config(), "last"), (ENCODER, "first")):
        batch = rows(records, model=model).batch(np.arange(2))
        assert batch.labels is not None and batch.positions is not None and len(batch.tokens) == 2 * 12
        for row, (labels, places) in enumerate(zip(batch.labels, batch.positions, strict=True)):
            [*labelled] = np.flatnonzero(labels.numpy() != IGNORED)
            assert labelled == ([] if row % 12 >= 4 else [0 if at == "first" else int(places.max())])
            assert not labelled or int(labels[labelled[0]]) == row % 12


def test_a_group_has_all_negatives_of_its_pairs_however_many_each_has(rows: AlikeRows) -> None:
    told = [pair(i) | ({"negative": [f"no {i}", f"nay {i}"][: i % 3]} if i % 4 else {"negative": None}) for i in range(24)]
    found = rows(told, record=AlikeRecord(anchor="anchor", positive="positive", negative="negative"))
    n = 0
    for row in range(len(found)):
        seen = texts(found.batch(np.array([row])))
        wanted = [text for each in seen[:4] for text in told[int(each.split()[1])]["negative"] or []]
        assert seen[8:] == wanted
        n += len(wanted)
    both = texts(found.batch(np.arange(2)))
    assert both == [text for row in range(2) for text in texts(found.batch(np.array([row])))]
    assert "pairs and " in found.describe() and 0 < n <= int(found.describe().split(" and ")[1].split()[0])
    assert "negative" not in rows([pair(i) for i in range(24)]).describe()
    long = rows([pair(i) | {"anchor": "x" * 50} for i in range(24)], among=2)
    assert "texts cut (the longest has 51 tokens; raise data.seq_len)" in long.describe()
    assert max(len(each) for each in texts(long.batch(np.arange(1)))) == 31, "and bos"


@pytest.mark.parametrize("first,second,third", [("query", "pos", "neg"), ("question", "answer", None), ("sentence1", "sentence2", None)])
def test_usual_names_are_recognised(rows: AlikeRows, first: str, second: str, third: str | None) -> None:
    beside = {third: ["d"]} if third else {}
    records = [{first: f"a{i}", second: ["b", "c"] if second == "pos" else "b", **beside, "id": 7} for i in range(30)]
    found = rows(records, among=2, val_frac=0.1)
    seen = texts(found.batch(np.arange(1)))
    assert all(each.startswith("a") for each in seen[:2]) and seen[2:] == ["b", "b", *["d", "d"] * bool(third)]
    assert any(f"read as {', '.join(filter(None, [first, second, third]))}" in line for line in said)
    assert any("not read: all but the first of pos" in line for line in said) == (second == "pos")


def test_prompts_stand_before_the_texts(rows: AlikeRows) -> None:
    record = AlikeRecord(query_prompt="ask: ", document_prompt="text: ")
    found = rows([pair(i) | {"negative": "no"} for i in range(30)], among=2, val_frac=0.1, record=record)
    seen = texts(found.batch(np.arange(1)))
    assert [each.rpartition(" ")[0] for each in seen] == ["ask: first"] * 2 + ["text: second"] * 2 + ["text:"] * 2
    assert record.prompts() == {"query": "ask: ", "document": "text: "} and AlikeRecord().prompts() == {}


def test_how_well_two_texts_belong_together_is_told_not_to_be_read(rows: AlikeRows) -> None:
    """Seen to fail: pairs of score 0, or of the label of a contradiction, were taken for paraphrases without a word."""
    for name in ("score", "label", "similarity_score"):
        said.clear()
        rows([{"sentence1": f"a{i}", "sentence2": "b", name: 0, "id": i} for i in range(30)], among=2, val_frac=0.1)
        assert f"records: not read: {name}" in said


def test_a_text_that_looks_like_a_list_is_a_text_unless_it_is_one_of_texts(rows: AlikeRows) -> None:
    """Code does, and columns of tables hold lists so. Seen to fail: [1, 2] held 1, not a string, and [] no text."""
    for positive, read in (("[1, 2]", "[1, 2]"), ("[]", "[]"), ("7", "7"), ('["b", "c"]', "b"), (["b", "c"], "b")):
        found = rows([{"anchor": f"a{i}", "positive": positive, "negative": "[3]"} for i in range(30)], among=2, val_frac=0.1)
        assert texts(found.batch(np.arange(1)))[2:] == [read] * 2 + ["[3]"] * 2
        assert any("all but the first" in line for line in said) == (read == "b")


def test_negatives_may_stand_in_fields_of_their_own(rows: AlikeRows) -> None:
    """As sentence-transformers publishes mined ones."""
    found = rows(
        [{"query": f"a{i}", "answer": "b", "negative_1": "c", "negative_2": None, "negative_3": "d"} for i in range(30)],
        among=2,
        val_frac=0.1,
    )
    assert texts(found.batch(np.arange(1)))[4:] == ["c", "d"] * 2
    assert "records: read as query, answer, negative_1, negative_2, negative_3" in said
    named = AlikeRecord(anchor="query", positive="answer", negative=["negative_3"])
    found = rows(
        [{"query": f"a{i}", "answer": "b", "negative_1": "c", "negative_3": "d"} for i in range(30)], among=2, val_frac=0.1, record=named
    )
    assert texts(found.batch(np.arange(1)))[4:] == ["d", "d"] and "records: not read: negative_1" in said


@pytest.mark.parametrize(
    ("record", "named", "fault"),
    [
        (
            {"text": "a"},
            None,
            r"its fields text have no usual names of two texts that belong together \(anchor with positive, query with positive,",
        ),
        ({"query": "a", "answer": "b", "question": "c"}, None, "could be read as query with answer and as question with answer"),
        ({"anchor": "a", "positive": " "}, None, "field 'positive' holds \" \", and no text"),
        ({"anchor": "a", "positive": []}, None, r"field 'positive' holds \[\], and no text"),
        ({"anchor": "a", "positive": "b", "negative": 3}, None, "field 'negative' holds 3, not a string"),
        (
            {"anchor": "a", "positive": "b"},
            ("anchor", "b"),
            "field 'b' is missing.* Set data.record.positive",
        ),
    ],
)
def test_a_bad_record_is_told(rows: AlikeRows, record: Any, named: tuple[str, str] | None, fault: str) -> None:
    record_config = None if named is None else AlikeRecord(anchor=named[0], positive=named[1])
    with pytest.raises(ConfigError, match=fault):
        rows([pair(0), record], record=record_config)


def test_both_fields_are_named_or_none() -> None:
    with pytest.raises(ConfigError, match="anchor and positive are named together"):
        AlikeRecord(anchor="a")
