"""objective=kto: answers that are rated as good or bad, each on its own."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lm
from lm.cli.compose.compose import compose_config
from lm.data.loader import Steps
from lm.data.mixture import merged
from lm.data.rows.rated import RatedRows
from lm.data.sizes import Sizes
from lm.errors import ConfigError
from lm.losses.kto import KTOLoss
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.objectives.base import build_objective
from lm.training.run import train_rank
from tests.training.conftest import Configure, in_each_way, read, settled

Made = Callable[..., TrainConfig]


def rated(n: int = 120) -> list[dict[str, Any]]:
    draw = random.Random(0)
    answers = [[str(i), *draw.choices("abc" if i % 3 else "xyz", k=draw.randint(2, 7))] for i in range(n)]
    return [{"prompt": f"say {i % 9}", "completion": " ".join(said), "label": i % 3 > 0} for i, said in enumerate(answers)]


@pytest.fixture
def parent(configure: Configure, tmp_path: Path) -> Path:
    train_rank(configure("run.name=parent", "trainer.max_steps=3", "data.seq_len=128", "model.dropout=0"))
    return tmp_path / "parent"


@pytest.fixture
def of_rated(tiny: list[str], parent: Path, tmp_path: Path) -> Made:
    """The config of a run on rated answers."""
    (tmp_path / "rated.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rated()))
    kept = [each for each in tiny if not each.startswith(("model", "tokenizer"))]

    def run(*more: str) -> TrainConfig:
        own = ("data=rated", f"data.files={tmp_path / 'rated.jsonl'}", "data.val_frac=0.2", "objective=kto", "data.seq_len=48")
        return compose_config(settled(*kept, f"init_from={parent}", *own, "data.global_batch=8", *more))

    return run


def test_the_loss_is_that_of_the_paper() -> None:
    """Weight minus value, by equation 8, in numpy."""
    gain, good = torch.tensor([0.7, -2.0, 3.0, 0.1], dtype=torch.float64, requires_grad=True), torch.tensor([True, True, False, False])
    sums = KTOLoss(beta=0.3, good_weight=1.5, bad_weight=0.5)(gain, good, torch.tensor(0.4))
    values = [
        1.5 / (1 + np.exp(-0.3 * (0.7 - 0.4))), 1.5 / (1 + np.exp(-0.3 * (-2.0 - 0.4))),
        0.5 / (1 + np.exp(-0.3 * (0.4 - 3.0))), 0.5 / (1 + np.exp(-0.3 * (0.4 - 0.1))),
    ]  # fmt: skip
    assert sums.total.item() == pytest.approx(2 * 1.5 + 2 * 0.5 - sum(values))
    assert {name: pair.tolist() for name, pair in sums.metrics.items()} == {
        "accuracy": [1.0, 4], "good_gain": pytest.approx([-1.3, 2]), "bad_gain": pytest.approx([3.1, 2]),
    }  # fmt: skip
    sums.total.backward()
    assert gain.grad is not None and (gain.grad[:2] < 0).all() and (gain.grad[2:] > 0).all()


def gain_of(model: LM, start: LM, batch: Batch) -> torch.Tensor:
    """Row by row, without padding, from whole logits."""
    found = []
    assert batch.labels is not None and batch.positions is not None
    for tokens, labels, at in zip(batch.tokens, batch.labels, batch.positions, strict=True):
        said, own = tokens[None, at >= 0], labels[at >= 0]
        logs = [net(said)[0].log_softmax(-1)[own != IGNORED].gather(-1, own[own != IGNORED, None]).sum() for net in (model, start)]
        found.append(logs[0] - logs[1])
    return torch.stack(found)


@pytest.mark.slow
def test_a_step_has_one_reference_point_however_it_is_split(of_rated: Made, parent: Path) -> None:
    """The mean gain of all its prompts with answers to others, by another computation.  Seen to fail with that of each micro-batch."""
    cfg = of_rated("objective.good_weight=0.5")
    batches = lm.batches(cfg)
    start, model = lm.load(parent)[0], lm.load(parent)[0]
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    sums = {}
    for size in (8, 4, 1):
        objective = build_objective(cfg)
        micro = Steps(batches.train, 0, Sizes(8), size, rank=0, world=1, train_rows=None, widest_first=False)[2]
        assert all(batch.step_tokens == 8 for batch in micro) and [len(batch.beside) for batch in micro] == [8 // size] + [0] * (
            8 // size - 1
        )
        told = [objective(model, batch, 2, 0) for batch in micro]
        sums[size] = sum(each.total.item() for each in told)
        if size == 8:
            [whole], kl = micro, told[0].metrics["kl"][0] / 8
    with torch.no_grad():
        point = gain_of(model, start, whole.beside[0]).mean()
        gains = gain_of(model, start, whole)
    assert kl.item() == pytest.approx(point.item(), rel=1e-4) and abs(point) > 0.05
    assert whole.answers is not None
    good = (whole.answers != IGNORED).any(-1)
    sign, z0 = torch.where(good, 1.0, -1.0), max(point.item(), 0.0)
    expected = (torch.where(good, 0.5, 1.0) * (1 - torch.sigmoid(0.1 * sign * (gains - z0)))).sum()
    for total in sums.values():
        assert total == pytest.approx(expected.item(), rel=1e-5)


def test_each_answer_is_also_one_to_another_prompt(of_rated: Made) -> None:
    batches = lm.batches(of_rated())
    ids = np.arange(len(batches.train))
    batch = batches.train.batch(ids)
    [beside] = batch.beside
    assert batch.labels is not None and beside.labels is not None and batch.answers is not None

    def said(labels: torch.Tensor) -> list[str]:
        return [batches.tokenizer.decode(row[row != IGNORED].tolist()) for row in labels]

    own, other = said(batch.labels), said(beside.labels)
    assert sorted(own) == sorted(other) and sum(one == two for one, two in zip(own, other, strict=True)) < len(ids) / 5
    for tokens, mixed, labels in zip(batch.tokens, beside.tokens, batch.labels, strict=True):
        prompt = int((labels != IGNORED).nonzero()[0]) + 1
        assert tokens[:prompt].tolist() == mixed[:prompt].tolist()
    labels = {line["completion"]: line["label"] for line in rated()}
    good = (batch.answers != IGNORED).any(-1).tolist()
    assert [labels[text.removesuffix("</s>").strip()] for text in own] == good and 0 < sum(good) < len(good)


@pytest.mark.slow
def test_an_answer_that_just_fits_is_kept_and_with_another_prompt_it_is_cut(of_rated: Made, tmp_path: Path) -> None:
    lines = [line | {"prompt": "?" * (1 + i % 9)} for i, line in enumerate(rated())]
    (tmp_path / "rated.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def rows(seq_len: int) -> RatedRows:
        found = lm.batches(of_rated(f"data.seq_len={seq_len}", "data.val_rows=1")).train
        assert isinstance(found, RatedRows)
        return found

    every = rows(48)
    lengths = [int((every.batch(np.array([i])).tokens[0] != every.pad).sum()) for i in range(len(every))]
    assert len(rows(max(lengths))) == len(lengths) == len(rows(max(lengths) - 1)) + lengths.count(max(lengths))
    most = sorted(lengths)[-1 - len(lengths) // 12]  # as many may be dropped
    low = rows(most)
    beside = [int((low.batch(np.array([i])).beside[0].tokens[0] != low.pad).sum()) for i in range(len(low))]
    assert max(beside) == most


def test_the_last_answer_alone_is_rated(of_rated: Made, tmp_path: Path) -> None:
    chats = [[("user", f"{i}"), ("assistant", "one"), ("user", "b"), ("assistant", "two")] for i in range(40)]
    lines = [{"messages": [{"role": role, "content": text} for role, text in chat], "label": True} for chat in chats]
    (tmp_path / "rated.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    batches = lm.batches(of_rated("data.seq_len=128"))
    labels = batches.train.batch(np.array([0])).labels
    assert labels is not None
    text = batches.tokenizer.decode(labels[labels != IGNORED].tolist())
    assert "two" in text and "one" not in text


@pytest.mark.slow
def test_it_tells_good_from_bad_and_is_evaluated_as_validated(of_rated: Made, tmp_path: Path) -> None:
    train_rank(of_rated("optim=adamw", "optim.lr=0.003", "trainer.max_steps=20", "trainer.val_every=20", "data.global_batch=16"))
    first, *_, last = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "val_loss" in line]
    steps = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "kl" in line]
    assert first["val_answer_loss"] == pytest.approx(0.5) == steps[0]["loss"] and steps[0]["kl"] == 0 and steps[-1]["kl"] != 0
    assert last["val_good_gain"] > last["val_bad_gain"] and last["val_answer_loss"] < 0.5
    assert first["val_error"] == 0.5 and last["val_error"] == pytest.approx(1 - last["val_accuracy"], abs=1e-6)
    again = lm.evaluate(tmp_path / "run")
    names = [name for name in last if name.startswith("val_")]
    assert {name: again[name] for name in names} == pytest.approx({name: last[name] for name in names}, rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_is_the_one_that_was_left_alone(of_rated: Made, goes_on_to_the_bit: Callable[[TrainConfig], None]) -> None:
    goes_on_to_the_bit(of_rated())


@pytest.mark.slow
@in_each_way
def test_ranks_and_micro_batches_learn_as_one(of_rated: Made, learns_as_one: Callable[..., None], where: list[str]) -> None:
    learns_as_one(of_rated, *where)


def test_a_validation_may_have_no_good_answer(of_rated: Made, tmp_path: Path) -> None:
    """Seen to fail: its loss was that of good ones alone."""
    bad = [line | {"label": 0} for line in rated()]
    (tmp_path / "rated.jsonl").write_text("".join(json.dumps(line) + "\n" for line in bad))
    train_rank(of_rated("trainer.max_steps=3"))
    last = read(tmp_path / "run" / "metrics.jsonl")[-1]
    assert "val_good_gain" not in last and last["val_bad_gain"] != 0


def test_preferences_are_two_rated_answers(of_rated: Made, tmp_path: Path) -> None:
    lines = [{"prompt": f"say {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    batches = lm.batches(of_rated("data=preferences", f"data.files={tmp_path / 'pairs.jsonl'}"))
    batch = batches.train.batch(np.arange(len(batches.train)))
    assert batch.answers is not None and batch.labels is not None
    good = (batch.answers != IGNORED).any(-1)
    texts = [batches.tokenizer.decode(row[row != IGNORED].tolist()) for row in batch.labels]
    assert [text.startswith("yes") for text in texts] == good.tolist() == [True, False] * (len(texts) // 2)


def test_batches_of_several_sources_keep_answers_to_other_prompts(of_rated: Made) -> None:
    """Seen to fail where they are left out, which makes a step's reference point 0."""
    rows = lm.batches(of_rated()).train
    parts = [rows.batch(np.array([0, 2])), rows.batch(np.array([1]))]
    whole = merged(parts, [np.array([0, 2]), np.array([1])], pad=0)
    assert whole.beside == [*parts[0].beside, *parts[1].beside] and [len(each.tokens) for each in whole.beside] == [2, 1]


@pytest.mark.slow
def test_what_is_not_rated_is_refused(of_rated: Made, tmp_path: Path) -> None:
    faults = {
        "field 'label' holds \"good\", and an answer is good or not: true or false": {"label": "good"},
        "field 'label' holds null": {"label": None},
        "the last message is not the assistant's": {"completion": [{"role": "user", "content": "b"}]},
    }
    for said, change in faults.items():
        (tmp_path / "rated.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b", "label": True} | change) + "\n")
        with pytest.raises(ConfigError, match=said):
            lm.batches(of_rated())


@pytest.mark.parametrize(("good", "bad"), [("True", "False"), ("1", "0")])
def test_a_table_of_texts_tells_what_is_good(of_rated: Made, tmp_path: Path, good: str, bad: str) -> None:
    """Seen to fail: every csv file was refused, whose labels can be nothing but texts."""
    with (tmp_path / "rated.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["prompt", "completion", "label"])
        table.writeheader()
        table.writerows(line | {"label": good if line["label"] else bad} for line in rated())
    lines, read = (lm.batches(of_rated(f"data.files={tmp_path / name}")).train for name in ("rated.jsonl", "rated.csv"))
    ids = np.arange(len(lines))
    assert len(read) == len(lines) and torch.equal(read.batch(ids).answers, lines.batch(ids).answers)
