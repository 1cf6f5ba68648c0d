"""objective=classify: texts in rows, and where their labels stand."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models

from lm.cli.compose.compose import compose_config
from lm.data.config import DataConfig
from lm.data.kinds import ClassifyConfig, LabelRecord, TextConfig, WordPieceConfig
from lm.data.rows.base import Rows
from lm.data.rows.build import build_rows
from lm.data.rows.reading import Reading
from lm.data.sources.base import Split
from lm.data.store.distributed import merge, prepare_part
from lm.data.store.prepare import prepare
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.config import BytesConfig, TokenizerFileConfig
from lm.errors import ConfigError
from lm.generation.evaluate import Evaluator, OneRank
from lm.losses.measure import Choices
from lm.nn.batch import IGNORED
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import EncoderConfig, build_model
from lm.schema import from_tree
from lm.testing.models import BASE
from tests.nn.models import config, with_kinds

Record = dict[str, Any]
TEXTS: list[Record] = [{"text": "x" * (1 + 7 * i % 40), "label": ("good", "bad", "grim")[i % 3]} for i in range(60)]
LABELS = ["bad", "good", "grim"]


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., Rows]:
    def build(
        records: list[Record], model: ModelConfig, tokenizer: Any = None, labels: list[str] | None = None, split: Split = "train",
        **options: Any,
    ) -> Rows:  # fmt: skip
        file = tmp_path / "a.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        record = LabelRecord(**options.pop("record", {}))
        data: DataConfig = TextConfig(
            **{"files": str(file), "cache_dir": str(tmp_path / "cache"), "record": record, "val_frac": 0.01, "seq_len": 32} | options
        )
        prepared = prepare(data, tokenizer or BytesConfig(), log=lambda line: None)
        store = prepared.parts[""].stores[split]
        return build_rows(ClassifyConfig(labels=labels or LABELS), data, store, prepared.tokenizer, model)

    return build


def encoder() -> ModelConfig:
    return from_tree(EncoderConfig, with_kinds(BASE | {"kind": "encoder"}))


@pytest.mark.parametrize("packing", ["fit", "none"])
@pytest.mark.parametrize(("model", "behind", "at"), [(config(), [], -1), (encoder(), [257], 0)], ids=["decoder", "encoder"])
def test_a_label_is_at_the_last_token_in_a_decoder_and_at_the_first_in_an_encoder(
    rows: Callable[..., Rows], model: ModelConfig, behind: list[int], at: int, packing: str
) -> None:
    """Every text is there once, between bos and, where tokens see each other both ways, eos; its end is left out where it is too long."""
    found = rows(TEXTS, model, packing=packing)
    batch = found.batch(np.arange(len(found)))
    assert batch.labels is not None and batch.documents is not None and batch.positions is not None
    seen = []
    for row in range(len(found)):
        for number in range(int(batch.documents[row].max()) + 1):
            places = batch.documents[row] == number
            tokens, labels = batch.tokens[row][places].tolist(), batch.labels[row][places].tolist()
            assert batch.positions[row][places].tolist() == [*range(len(tokens))]
            assert labels.pop(at) in range(3) and {*labels} <= {IGNORED}
            assert tokens[0] == 256 and tokens[len(tokens) - len(behind) :] == behind and len(tokens) <= 32
            seen.append((len(tokens) - 1 - len(behind), LABELS[int(batch.labels[row][places][at])]))
    most = 31 - len(behind)
    given = Counter((min(len(each["text"]), most), each["label"]) for each in TEXTS)
    assert len(seen) == found.n_labels >= 55 and not Counter(seen) - given
    assert (batch.labels != IGNORED).sum() == found.n_labels and (packing == "none") == (len(found) == found.n_labels)
    documents = found.documents(np.arange(len(found)))
    assert documents is not None and documents.shape == batch.labels.shape
    assert sorted(documents[batch.labels.numpy() != IGNORED].tolist()) == [*range(found.n_labels)]


def test_labels_are_read_beside_a_tokenizer_of_fewer_tokens_than_there_are_bytes(rows: Callable[..., Rows], tmp_path: Path) -> None:
    """As of proteins. Seen to fail: the bytes of labels were held for damage of the token cache, which was to be deleted."""
    raw = RawTokenizer(models.BPE({"x": 0, "[CLS]": 1, "[SEP]": 2}, []))
    raw.save(str(tmp_path / "tokenizer.json"))
    small = TokenizerFileConfig(path=str(tmp_path), bos="[CLS]", eos="[SEP]")
    for verify in ("sample", "full"):
        found = rows(TEXTS, encoder(), tokenizer=small, verify=verify)
        assert found.n_labels >= 55 and int(found.batch(np.arange(len(found))).tokens.max()) < 3
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(record) + "\n" for record in TEXTS))
    data = TextConfig(files=[str(tmp_path / f"{n}.jsonl") for n in "ab"], cache_dir=str(tmp_path / "parts"), record=LabelRecord())
    for part in (1, 2):
        prepare_part(data, small, part, 2, log=print)
    assert TokenStore(merge(data, small, 2, log=print), "train").n_documents > 2 * 50


@pytest.mark.parametrize("packing", ["fit", "none"])
def test_pairs_stand_in_rows_as_they_are_read_alone(rows: Callable[..., Rows], packing: str) -> None:
    """With the segments that tell their texts apart, cut where they are too long."""
    records = [{"a": "x" * (1 + 7 * i % 23), "meta": {"b": "y" * (1 + 5 * i % 19)}, "label": LABELS[i % 3]} for i in range(60)]
    model = encoder().replace(embed={"segments": 2})
    found = rows(records, model, packing=packing, record={"text": "a", "text_pair": "meta.b"}, val_frac=0.0001)
    batch = found.batch(np.arange(len(found)))
    assert batch.labels is not None and batch.documents is not None and batch.segments is not None and "pairs in" in found.describe()
    reading, alone = Reading(model, BytesConfig().build(), 32), []
    for record in records:
        read = reading.text(record["a"], record["meta"]["b"])
        alone.append((read.ids.tolist(), read.segments.tolist() if read.segments is not None else [], LABELS.index(record["label"])))
    seen = []
    for row in range(len(found)):
        for number in range(int(batch.documents[row].max()) + 1):
            places = batch.documents[row] == number
            tokens, segments, labels = (each[row][places].tolist() for each in (batch.tokens, batch.segments, batch.labels))
            assert {*labels[1:]} <= {IGNORED}
            seen.append((tokens, segments, labels[0]))
    assert len(seen) == found.n_labels >= 58 and not Counter(map(str, seen)) - Counter(map(str, alone))
    assert any(len(tokens) == 32 and 0 < sum(segments) < 16 for tokens, segments, _ in seen)
    assert (batch.segments[batch.documents < 0] == 0).all()


@pytest.mark.parametrize(
    ("model", "read"), [(config(), [256, 97, 256, 98]), (encoder(), [256, 97, 257, 98, 257])], ids=["decoder", "encoder"]
)
def test_between_two_texts_stands_what_ends_one_or_else_begins_it(model: ModelConfig, read: list[int]) -> None:
    found = Reading(model, BytesConfig().build(), 32).text("a", "b")
    assert found.ids.tolist() == read and found.segments is None


def test_a_label_may_be_a_number_and_its_field_lie_deeper(rows: Callable[..., Rows]) -> None:
    numbered = [{"said": record["text"], "meta": {"kind": LABELS.index(record["label"])}} for record in TEXTS]
    found = rows(numbered, config(), record={"text": "said", "label": "meta.kind"}), rows(TEXTS, config())
    assert all((one.batch(np.array([0])).labels == found[1].batch(np.array([0])).labels).all() for one in found)
    assert "% of them" in found[0].describe()


@pytest.mark.parametrize("numbered", [False, True])
def test_a_model_that_tells_the_same_apart_keeps_its_order(rows: Callable[..., Rows], numbered: bool) -> None:
    """Numbers are those of objective.labels. Seen to fail: those of the model."""
    told = ["grim", "bad", "good"]
    records = [{**record, "label": LABELS.index(record["label"])} for record in TEXTS] if numbered else TEXTS
    model = config().replace(head=config().head.telling(told, bias=False))
    mine, other = (rows(records, each).batch(np.arange(5)).labels for each in (model, config()))
    assert mine is not None and other is not None and (mine != other).any()
    named = [[names[i] if i >= 0 else "" for i in labels.flatten().tolist()] for names, labels in ((told, mine), (LABELS, other))]
    assert named[0] == named[1]


def test_counts_of_labels_are_sums_over_ranks(rows: Callable[..., Rows]) -> None:
    """Of which one has a batch fewer, and makes up for it by one that does not count."""
    cfg, found = config(vocab_size=320, max_seq_len=32), rows(TEXTS, config(), packing="none")
    model = build_model(cfg.replace(head=cfg.head.telling(LABELS, bias=False)), seed=0)
    ids, whole = np.arange(9), Evaluator(model, BytesConfig().build(), 2, Choices())
    each = []
    for rank in range(2):
        alone = OneRank()
        alone.rank, alone.world = rank, 2
        each.append(replace(whole, ranks=alone).totals(found, ids))
    total = whole.totals(found, ids)
    assert total.counts is not None and total.counts[:, 2].sum() == total.counts[:, 1].sum() == 9
    assert (each[0] + each[1]).figures() == pytest.approx(total.figures()) and "val_macro_f1" in total.figures()


def test_names_of_digits_come_before_numbers(rows: Callable[..., Rows]) -> None:
    """Seen to fail: label 1 was the second."""
    digits = [{"text": record["text"], "label": 1} for record in TEXTS]
    batch = rows(digits, config(), labels=["1", "0"]).batch(np.array([0]))
    assert batch.labels is not None and batch.labels.max() == 0


def test_numbers_are_no_places_where_a_name_is_a_number(rows: Callable[..., Rows]) -> None:
    """Seen to fail: of labels 0 to 4, with the names 1 to 5, both 0 and 1 were the first."""
    stars = [{"text": record["text"], "label": i % 5} for i, record in enumerate(TEXTS)]
    with pytest.raises(ConfigError, match=r"the label '0' .* not in objective.labels=\[1,2,3,4,5\].*those of this split are \[0,1,2,3,4\]"):
        rows(stars, config(), labels=["1", "2", "3", "4", "5"])


def test_whole_numbers_of_columns_with_gaps_and_truths_are_labels(rows: Callable[..., Rows]) -> None:
    for given, labels in (((0.0, 1.0), ["no", "yes"]), ((False, True), ["false", "true"])):
        found = rows([{"text": record["text"], "label": given[i % 2]} for i, record in enumerate(TEXTS)], config(), labels=labels)
        plain = rows([{"text": record["text"], "label": i % 2} for i, record in enumerate(TEXTS)], config(), labels=["a", "b"])
        assert (found.batch(np.array([0])).labels == plain.batch(np.array([0])).labels).all()


@pytest.mark.parametrize("none", [None, float("nan"), "", -1, -1.0])
def test_texts_without_a_label_are_left_out_and_counted(rows: Callable[..., Rows], none: object) -> None:
    """-1 where all labels occur beside it: of -1, 0 and 1 with three names it may be one of them."""
    found = rows([*TEXTS, *({"text": f"more {i}", "label": none} for i in range(7))], config())
    batch = found.batch(np.arange(len(found)))
    assert batch.labels is not None and found.n_labels == (batch.labels != IGNORED).sum() <= 60
    assert (batch.labels[batch.labels != IGNORED] >= 0).all()
    assert ("left out, whose label -1 is none" in found.describe()) == (none == -1)


@pytest.mark.parametrize("labelled", [True, False])
def test_what_is_no_label_is_told_by_all_splits(rows: Callable[..., Rows], tmp_path: Path, labelled: bool) -> None:
    """Seen to fail: of a few texts for validation, in which one label did not occur beside -1, the run was refused."""
    held_out = [{"text": "aa", "label": -1}, *([{"text": "b", "label": "grim"}] if labelled else [])]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(record) + "\n" for record in held_out))
    given: dict[str, Any] = {"split": "val", "val_files": str(tmp_path / "b.jsonl")}
    if labelled:
        assert rows(TEXTS, config(), **given).describe() == (
            "val: 1 text in 1 row of 32 tokens, 100.0% of them 'grim'; 1 left out, whose label -1 is none"
        )
    else:
        with pytest.raises(ConfigError, match=r"the val split has 0 texts with a label\."):
            rows(TEXTS, config(), **given)


def test_labels_are_told_as_they_can_be_typed(rows: Callable[..., Rows]) -> None:
    """All of them: seen to fail with those of banking77, and commas within names."""
    names = [*(f"intent {i}" for i in range(98)), "a, b", 'the "c"']
    records = [{"text": record["text"] * (1 + i // 60), "label": names[i % 100]} for i, record in enumerate(TEXTS * 5)]
    with pytest.raises(ConfigError, match="those of this split are") as error:
        rows(records, config(), val_frac=0.0001)
    typed = error.value.sentence.rpartition(" are ")[2].removesuffix(".")
    cfg = compose_config(["data=labels", "data.files=a", "objective=classify", f"objective.labels={typed}"])
    assert isinstance(cfg.objective, ClassifyConfig) and sorted(cfg.objective.labels or []) == sorted(names)


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (
            [*TEXTS, {"text": "one more", "label": "so-so"}],
            r"'so-so' .* not in objective.labels=\[bad,good,grim\].*those of",
        ),
        ([{"text": "a", "label": 3}] * 9 + TEXTS, "label '3'"),
        ([*TEXTS, {"text": "a", "label": 0.5}], "the label '0.5' of .*, or set objective=regression for numbers; those of"),
        ([*TEXTS, {"text": "a", "label": ["bad", "good"]}], r"set objective=multi_label for several at once; those of"),
        ([*TEXTS, {"text": "a", "label": {"bad": 1}}], "neither a name, nor a number, nor a list of names"),
        ([*TEXTS, {"text": "a", "label": float("inf")}], "neither a name, nor a number, nor a list of names"),
        ([*TEXTS, {"text": "a", "label": True}], "the label 'true' of"),
        ([{"text": record["text"], "label": i % 3 - 1} for i, record in enumerate(TEXTS)], "the label '-1' of"),
        ([{"text": record["text"], "label": -1} for record in TEXTS], "the label '-1' of"),
        ([*TEXTS, {"text": "a"}], "field 'label' is missing"),
        ([{"text": "a", "label": " "}], "0 documents for training"),
    ],
)
def test_what_is_no_label_is_refused(rows: Callable[..., Rows], records: list[Record], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rows(records, config())


def test_labels_do_not_go_through_the_tokenizer(rows: Callable[..., Rows]) -> None:
    """Which makes one of all that it does not know: seen to fail with labels that were encoded as text."""
    words = [{"text": "x" * (1 + i % 9), "label": ("好", "坏")[i % 2]} for i in range(60)]
    found = rows(words, encoder(), WordPieceConfig(vocab_size=270), ["好", "坏"])
    batch = found.batch(np.arange(len(found)))
    assert batch.labels is not None and {*batch.labels[batch.labels != IGNORED].tolist()} == {0, 1}


def test_what_was_read_says_whether_its_texts_lost_an_end() -> None:
    for model in (config(), encoder()):
        reading = Reading(model, BytesConfig().build(), 8)
        short, long = (next(n for n in range(20) if reading.text("x" * n).cut == cut) for cut in (False, True))
        assert (short, len(reading.text("x" * (long - 1)).ids), len(reading.text("x" * long).ids)) == (0, 8, 8)
        assert reading.text("a", "b" * 9).cut and reading.text("a" * 9, "b").cut and not reading.text("a", "b").cut
