"""What each document contributes: against a loop over documents, and over the processes that share the work."""

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lm.data.kinds import BytesConfig, CausalConfig, ClassifyConfig, LabelRecord, TextConfig
from lm.data.layout.mixed import MixedRows
from lm.data.rows.base import Rows
from lm.data.rows.build import build_rows
from lm.data.store.prepare import Prepared, prepare
from lm.generation.documents import Documents
from lm.generation.evaluate import Evaluator
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import LM
from tests.nn.models import config, redrawn
from tests.training.callbacks.test_validation import Share

SEQ = 32
Sums = dict[int, list[float]]


@pytest.fixture(scope="module")
def model() -> LM:
    return redrawn(config(vocab_size=320))


def prepared(folder: Path, n: int, **more: Any) -> tuple[TextConfig, Prepared]:
    """Documents of 3 to 90 letters, a line each."""
    draw = random.Random(n)
    lines = [json.dumps({"text": "".join(draw.choices("abcdef gh", k=draw.randint(3, 90)))}) for _ in range(n)]
    (folder / f"{n}.jsonl").write_text("\n".join(lines))
    cfg = TextConfig(files=str(folder / f"{n}.jsonl"), seq_len=SEQ, cache_dir=str(folder / "cache"), **more)
    return cfg, prepare(cfg, BytesConfig(), log=lambda line: None)


def one_by_one(model: LM, data: Prepared) -> Sums:
    """Every document in a row of its own, cut every SEQ tokens: nats, tokens and bytes."""
    found: Sums = defaultdict(lambda: [0.0, 0, 0])
    ends = [*data.train.starts[1:].tolist(), data.train.n_tokens]
    for number, (begin, end) in enumerate(zip(data.train.starts.tolist(), ends, strict=True)):
        tokens = torch.from_numpy(data.train.read(begin, end).astype(np.int64))
        for at in range(0, len(tokens) - 1, SEQ):
            piece = tokens[at : at + SEQ + 1]
            with torch.inference_mode():
                logits = model(Batch(piece[None, :-1]))[0]
            sizes = data.tokenizer.token_bytes()
            assert sizes is not None
            more = (F.cross_entropy(logits, piece[1:], reduction="sum").item(), len(piece) - 1, int(sizes[piece[1:].numpy()].sum()))
            found[number] = [a + b for a, b in zip(found[number], more, strict=True)]
    return found


def sums_of(model: LM, rows: Rows, data: Prepared, world: int = 1) -> tuple[str, Sums]:
    """As the processes find them together."""
    ids = np.arange(len(rows))
    each = [Documents(rows, ids, data.tokenizer, 2) for _ in range(world)]
    for rank, documents in enumerate(each):
        Evaluator(model, data.tokenizer, 2, ranks=Share(rank, world)).totals(rows, ids, closely=True, documents=documents)
    found = each[0].found(np.sum([documents.flat() for documents in each], axis=0).tolist())
    return found.unit, {int(number): list(values) for number, values in found.sums.items()}


def test_whole_documents_side_by_side_contribute_what_each_does_alone(model: LM, tmp_path: Path) -> None:
    cfg, data = prepared(tmp_path, 40, packing="fit")
    rows = build_rows(CausalConfig(), cfg, data.train, data.tokenizer, model.cfg)
    expected = one_by_one(model, data)
    for world in (1, 3):
        unit, found = sums_of(model, rows, data, world)
        assert unit == "documents" and found.keys() == expected.keys()
        for number, values in found.items():
            assert values == pytest.approx(expected[number], rel=1e-5)


def test_documents_cut_by_rows_add_up_to_what_is_evaluated(model: LM, tmp_path: Path) -> None:
    cfg, data = prepared(tmp_path, 41)
    rows = build_rows(CausalConfig(), cfg, data.train, data.tokenizer, model.cfg)
    unit, found = sums_of(model, rows, data)
    whole = Evaluator(model, data.tokenizer, 2).totals(rows, np.arange(len(rows)))
    assert unit == "documents" and np.sum([*found.values()], axis=0) == pytest.approx([whole.nats, whole.tokens, whole.n_bytes], rel=1e-6)
    lengths = np.diff(data.train.starts, append=data.train.n_tokens)
    assert {number: values[1] for number, values in found.items()} == dict(enumerate((lengths - 1).tolist()))


def test_a_text_of_few_documents_is_told_by_row_and_a_mixture_by_the_documents_of_all(model: LM, tmp_path: Path) -> None:
    parts = {}
    for n in (16, 17):
        cfg, data = prepared(tmp_path, n, val_frac=0.2)
        parts[str(n)] = rows = build_rows(CausalConfig(), cfg, data.train, data.tokenizer, model.cfg)
        unit, found = sums_of(model, rows, data)
        assert unit == "rows" and [*found] == [*range(len(rows))]
    sizes = [rows.store.n_documents for rows in parts.values()]
    unit, found = sums_of(model, MixedRows(parts, data.tokenizer.pad), data)
    assert unit == "documents" and [*found] == sorted([2 * i for i in range(sizes[0])] + [2 * i + 1 for i in range(sizes[1])])


def test_texts_of_sources_of_unlike_lengths_each_in_a_row_of_its_own_count_by_themselves(model: LM, tmp_path: Path) -> None:
    """Seen to fail: rows of 16 and of 48 places, as batches of either source are wide, had no place in one table."""
    parts, labels = {}, ["no", "yes"]
    for name, size in {"short": 5, "long": 40}.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"text": "x" * size, "label": labels[i % 2]}) + "\n" for i in range(20)))
        cfg = TextConfig(files=str(file), cache_dir=str(tmp_path / "cache"), record=LabelRecord(), seq_len=64, packing="none")
        data = prepare(cfg, BytesConfig(), log=lambda line: None)
        parts[name] = build_rows(ClassifyConfig(labels=labels), cfg, data.train, data.tokenizer, model.cfg)
    rows = MixedRows(parts, data.tokenizer.pad)
    found, batch = rows.documents(np.arange(len(rows))), rows.batch(np.arange(len(rows)))
    assert found is not None and batch.labels is not None and found.shape == batch.labels.shape
    numbers = [2 * text + which for which, part in enumerate(parts.values()) for text in range(len(part))]
    assert found[batch.labels.numpy() != IGNORED].tolist() == numbers
