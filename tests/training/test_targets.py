"""objective=regression and objective=multi_label: heads for a number, and for any number of labels at once."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import lm
from lm.cli.compose.compose import compose_config
from lm.data.kinds import ClassifyConfig, RegressionConfig
from lm.errors import ConfigError
from lm.losses.targets import given
from lm.nn.batch import IGNORED, Batch
from lm.training.config import TrainConfig
from lm.training.run import train_rank
from tests.training.conftest import in_each_way, read, settled

WET, HOT = ["sea", "lake", "pond", "dew", "mist", "rain"], ["fire", "ember", "flame", "spark", "ash", "smoke"]
ENCODER = ("model=bert_tiny", "model.d_model=32", "model.n_layers=1", "model.attention.n_heads=2", "model.ffn.hidden=64")
NUMBERS, MARKS = ("objective=regression",), ("objective=multi_label", "objective.labels=[wet,hot]")
LONG = ("optim=adamw", "optim.lr=0.01", "trainer.max_steps=40", "trainer.val_every=40", "model.dropout=0", "data.val_rows=null")
STILL = ("optim=sgd", "optim.lr=1e-9", "trainer.max_steps=1", "schedule.warmup_steps=0")
Told = Callable[..., TrainConfig]
both = pytest.mark.parametrize("told", [NUMBERS, MARKS], ids=["regression", "multi_label"])


@pytest.fixture
def of_targets(tiny: list[str], tmp_path: Path) -> Told:
    """The config of a run that tells how hot a text is, or whether it is hot or wet; where it starts from another, with its model."""
    draw, lines, told = random.Random(0), [], {"numbers": 0.0, "marks": 0.0}
    for _ in range(400):
        words = draw.choices([*WET, *HOT], k=draw.randint(1, 4))
        hot = sum(word in HOT for word in words)
        told = {"numbers": 5 * hot / len(words) - 1, "marks": ["hot"] * (hot > 0) + ["wet"] * (hot < len(words))}
        lines.append(json.dumps({"text": " ".join(words), **told}) + "\n")
    (tmp_path / "a.jsonl").write_text("".join(lines))

    def run(*more: str) -> TrainConfig:
        field = "marks" if "objective=multi_label" in more else "numbers"
        own = ("data=labels", f"data.files={tmp_path / 'a.jsonl'}", "data.val_frac=0.2")
        own = own if "data=text" in more else (*own, f"data.record.label={field}")
        started = any(each.startswith("init_from=") for each in more)
        kept = [each for each in tiny if not (started and each.startswith(("model", "tokenizer")))]
        return compose_config(settled(*kept, *own, *more))

    return run


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def held_out(cfg: TrainConfig, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, k) logits and targets of the run's held-out texts, by a plain forward."""
    net, _ = lm.load(folder)
    [batch] = lm.batches(cfg).validation(micro_batch=500)
    assert batch.labels is not None
    with torch.no_grad():
        logits = net(Batch(batch.tokens, positions=batch.positions, documents=batch.documents))
    return logits[batch.labels != IGNORED], given(batch)


@pytest.mark.slow
@pytest.mark.parametrize("model", [(), ENCODER], ids=["decoder", "encoder"])
def test_a_regression_learns_its_number_and_is_measured_as_numpy_does(of_targets: Told, tmp_path: Path, model: tuple[str, ...]) -> None:
    cfg, folder = of_targets(*model, *NUMBERS, *LONG), tmp_path / "run"
    summary = train_rank(cfg)
    logits, targets = held_out(cfg, folder)
    guess, number = logits[:, 0].double().numpy(), targets[:, 0].double().numpy()
    last = read(folder / "metrics.jsonl")[-1]
    assert summary["val_loss"] == pytest.approx(np.square(guess - number).mean(), rel=1e-4)
    assert last["val_mae"] == pytest.approx(np.abs(guess - number).mean(), rel=1e-4) and cfg.objective.measure(None).less == ("mae",)
    assert last["val_pearson"] == pytest.approx(np.corrcoef(guess, number)[0, 1], abs=1e-5) and last["val_pearson"] > 0.5
    assert "val_bits_per_byte" not in last and "val_ece" not in lm.evaluate(folder)
    found = lm.evaluate(folder)
    assert [found["val_loss"], found["val_pearson"]] == pytest.approx([last["val_loss"], last["val_pearson"]], rel=1e-4)
    [cold, hot] = lm.classify(*lm.load(folder), ["sea lake rain", "fire ash smoke"])
    assert cold.keys() == {"score"} and cold["score"] < 1.5 < hot["score"]


@pytest.mark.slow
@pytest.mark.parametrize("model", [(), ENCODER], ids=["decoder", "encoder"])
def test_several_labels_are_learned_and_measured_as_sklearn_does(of_targets: Told, tmp_path: Path, model: tuple[str, ...]) -> None:
    measured = pytest.importorskip("sklearn.metrics")
    cfg, folder = of_targets(*model, *MARKS, *LONG), tmp_path / "run"
    summary = train_rank(cfg)
    logits, targets = held_out(cfg, folder)
    chances = logits.sigmoid()
    nats = torch.where(targets > 0, chances, 1 - chances).log().neg()
    assert summary["val_loss"] == pytest.approx(nats.mean().item(), rel=1e-4)
    guessed, there, last = chances.numpy() > 0.5, targets.numpy() > 0, read(folder / "metrics.jsonl")[-1]
    assert last["val_accuracy"] == pytest.approx(measured.accuracy_score(there, guessed), abs=1e-6) and last["val_accuracy"] > 0.5
    assert last["val_error"] == pytest.approx(1 - last["val_accuracy"], abs=1e-6)
    for average in ("macro", "micro"):
        assert last[f"val_{average}_f1"] == pytest.approx(measured.f1_score(there, guessed, average=average), abs=1e-6)
    sure = torch.maximum(chances, 1 - chances).prod(-1)
    right = torch.from_numpy((there == guessed).all(-1)).float()
    bins = (sure * 15).ceil().long()
    gaps = [(right[bins == one] - sure[bins == one]).sum().abs().item() for one in range(16)]
    assert lm.evaluate(folder)["val_ece"] == pytest.approx(sum(gaps) / len(sure), abs=1e-5)
    [found] = lm.classify(*lm.load(folder), ["sea fire"])
    assert abs(found["wet"] + found["hot"] - 1) > 0.05, "each has a probability of its own"


@pytest.mark.slow
@both
@pytest.mark.parametrize("model", [(), pytest.param(ENCODER, marks=pytest.mark.slow)], ids=["decoder", "encoder"])
def test_a_resumed_run_is_the_one_that_was_left_alone(
    of_targets: Told, goes_on_to_the_bit: Callable[[TrainConfig], None], told: tuple[str, ...], model: tuple[str, ...]
) -> None:
    goes_on_to_the_bit(of_targets(*told, *model))


@pytest.mark.slow
@both
@in_each_way
def test_ranks_and_micro_batches_learn_as_one(
    of_targets: Told, learns_as_one: Callable[..., None], told: tuple[str, ...], where: list[str]
) -> None:
    learns_as_one(lambda *more: of_targets(*told, *more, "optim.lr=0.02"), *where)  # at 0.5 a regression diverges


@pytest.mark.slow
def test_a_head_is_kept_where_it_tells_the_same(of_targets: Told, tmp_path: Path) -> None:
    """Labels of which one is right are others than those of which several may be; a reward model's number is a number."""
    names = "objective.labels=[wet,hot]"
    train_rank(of_targets(*MARKS, *STILL))
    train_rank(of_targets(*NUMBERS, *STILL, "run.name=number"))
    marks, number = (weights(tmp_path / name)["head.weight"] for name in ("run", "number"))
    again = {
        "turned": (f"init_from={tmp_path / 'run'}", "objective=multi_label", "objective.labels=[hot,wet]"),
        "on": (f"init_from={tmp_path / 'run'}", "objective=multi_label"),
        "number_on": (f"init_from={tmp_path / 'number'}", *NUMBERS),
        "one": (f"init_from={tmp_path / 'run'}", "objective=classify", names, "data.record.label=numbers"),
    }
    for name, given_ in again.items():
        if name == "one":
            lines = [json.dumps({"text": "sea" * (1 + i % 9), "numbers": i % 2}) + "\n" for i in range(60)]
            (tmp_path / "b.jsonl").write_text("".join(lines))
            given_ = (*given_, f"data.files={tmp_path / 'b.jsonl'}")
        train_rank(of_targets(*given_, *STILL, f"run.name={name}", "seed=7"))
        before = number if name.startswith("number") else marks
        assert torch.allclose(weights(tmp_path / name)["head.weight"], before, atol=1e-6) == (name != "one"), name
    assert lm.load(tmp_path / "turned")[0].cfg.head.labelling() == (["wet", "hot"], True)
    assert lm.load(tmp_path / "one")[0].cfg.head.labelling() == (["wet", "hot"], False)
    assert lm.load(tmp_path / "number_on")[0].cfg.head.tells_number()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["objective=multi_label"], "objective=multi_label has no names for what is told"),
        (["objective=multi_label", "objective.labels=[]"], "are not different names"),
        (["objective=classify", "objective.labels=[one]"], "objective=regression tells a number"),
        (["objective=regression", "objective.labels=[a]"], r"objective.labels"),
        (["objective=regression", "objective.label_smoothing=0.1"], r"objective.label_smoothing"),
        (["objective=regression", "model=t5_small"], "model.kind is encoder_decoder"),
        (["objective=regression", "launch.context=2", "strategy=fsdp", "launch.devices=2"], "objective=regression needs whole rows"),
        (["objective=regression", "data=text"], "objective=regression needs records of the kind label"),
        ([*MARKS, "data.mask_documents=false"], "takes each document on its own"),
        (["objective=causal", "data=text", "model.head.several=true"], "several=true is of labels, and there are none"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_read(of_targets: Told, asked: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        of_targets(*asked)


def test_a_model_of_several_labels_is_no_classifier_of_one(of_targets: Told, tmp_path: Path) -> None:
    train_rank(of_targets(*MARKS, *STILL))
    data = of_targets(*MARKS).data
    for objective, said in (
        (ClassifyConfig(), "of the model's labels several may be right at once"),
        (ClassifyConfig(labels=["wet", "hot"]), r"the model's labels are \['wet', 'hot'\], any number at once"),
        (RegressionConfig(), r"asks for \['score'\], and the model's labels are"),
    ):
        with pytest.raises(ConfigError, match=said):
            lm.evaluate(tmp_path / "run", data, objective)
