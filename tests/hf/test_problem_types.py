"""Heads for a number and for several labels at once: what transformers calls problem_type, both ways, and its losses."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402

import lm  # noqa: E402
from lm.cli.compose.compose import compose_config  # noqa: E402
from lm.data.tokenizer.config import BytesConfig  # noqa: E402
from lm.errors import ConfigError  # noqa: E402
from lm.generation.classify import predicted  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.io.tokenizer import save_tokenizer  # noqa: E402
from tests.hf.harness import change  # noqa: E402
from tests.hf.test_classifiers import drawn  # noqa: E402

NAMES = ["wet", "hot", "old"]
SIZES: dict[str, Any] = {"vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
OWN: dict[str, Any] = {
    "Bert": {"type_vocab_size": 2},
    "ModernBert": {"classifier_pooling": "mean"},
    "Qwen3": {"head_dim": 8, "num_key_value_heads": 1},
}
TEXTS = ["".join(random.Random(i).choices("abcde", k=2 + 3 * i % 29)) for i in range(24)]
SEVERAL, NUMBER = "multi_label_classification", "regression"


def published(name: str, problem: str, folder: Path) -> Any:
    """A model of transformers with random weights, and a tokenizer of bytes beside it."""
    config = getattr(transformers, f"{name}Config")(**SIZES, **OWN[name], max_position_embeddings=48, pad_token_id=258)
    config.id2label = dict(enumerate(NAMES if problem == SEVERAL else ["LABEL_0"]))
    config.problem_type = problem
    theirs = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    for weight in (p for p in theirs.parameters() if p.ndim > 1):
        weight.data.normal_(std=0.3, generator=torch.Generator().manual_seed(len(weight)))
    theirs.save_pretrained(folder)
    save_tokenizer(folder, BytesConfig().build(), drawn("qwen3" if name == "Qwen3" else "bert"))
    return theirs


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("problem", [SEVERAL, NUMBER])
def test_the_loss_and_the_answers_are_those_of_transformers(name: str, problem: str, tmp_path: Path) -> None:
    """With the same weights: its own loss of a batch of all texts, its pipeline's scores, and both again behind an export."""
    theirs, draw = published(name, problem, tmp_path / "theirs"), random.Random(1)
    lm.import_model(tmp_path / "theirs", tmp_path / "ours", say=lambda line: None)
    marks = [[float(draw.random() < 0.4) for _ in NAMES] for _ in TEXTS]
    told: list[Any] = [[one for one, there in zip(NAMES, each, strict=True) if there] for each in marks]
    if problem == NUMBER:
        marks = [[draw.gauss(1, 2)] for _ in TEXTS]
        told = [number for [number] in marks]
    rows = [json.dumps({"text": text, "label": label}) + "\n" for text, label in zip(TEXTS, told, strict=True)]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    kind = "regression" if problem == NUMBER else "multi_label"
    asked = ["data=labels", f"data.files={tmp_path / 'a.jsonl'}", f"objective={kind}", f"init_from={tmp_path / 'ours'}", "data.seq_len=40"]
    cfg = compose_config([*asked, "data.val_frac=0.1", "data.val_rows=null"])
    found = lm.evaluate(tmp_path / "ours", cfg.data, cfg.objective, split="all")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "theirs")
    given = tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        expected = theirs(**given, labels=torch.tensor(marks).squeeze(-1) if problem == NUMBER else torch.tensor(marks))
    assert found["val_loss"] == pytest.approx(expected.loss.item(), rel=1e-4) and found["tokens"] == len(TEXTS)
    lm.export(tmp_path / "ours", tmp_path / "again", say=lambda line: None)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["problem_type"] == problem and len(config["id2label"]) == len(marks[0])
    answers = lm.classify(*lm.load(tmp_path / "ours"), TEXTS)
    for where in ("theirs", "again"):
        pipe = transformers.pipeline("text-classification", model=str(tmp_path / where), top_k=None)
        scores = [{each["label"]: each["score"] for each in one} for one in pipe(TEXTS, batch_size=5)]
        assert all(one == pytest.approx(other, abs=1e-5) for one, other in zip(answers, scores, strict=True))
    assert len({round(sum(each.values()), 2) for each in answers}) > 2


def test_what_is_predicted_are_all_labels_that_are_likelier_right_than_not(tmp_path: Path) -> None:
    published("Qwen3", SEVERAL, tmp_path)
    head = read_hf(tmp_path).config.head
    assert head.labelling() == (NAMES, True)
    assert predicted({"wet": 0.9, "hot": 0.2, "old": 0.6}, head)["labels"] == ["wet", "old"]
    assert predicted({"wet": 0.1, "hot": 0.2, "old": 0.3}, head)["labels"] == []


def test_one_label_of_several_has_a_probability_and_is_no_number(tmp_path: Path) -> None:
    published("Qwen3", NUMBER, tmp_path)
    assert read_hf(tmp_path).config.head.tells_number()
    change(tmp_path, problem_type=SEVERAL)
    head = read_hf(tmp_path).config.head
    assert not head.tells_number() and head.labelling() == (["LABEL_0"], True)


def test_several_numbers_are_refused(tmp_path: Path) -> None:
    published("Qwen3", SEVERAL, tmp_path)
    change(tmp_path, problem_type=NUMBER)
    with pytest.raises(ConfigError, match="problem_type=regression of 3 numbers, and lm's models tell one"):
        read_hf(tmp_path)
