"""Whole small runs of encoders and encoder-decoders: samples, the split into micro-batches, resuming."""

import json
from pathlib import Path

import pytest
import torch

from lm.generation.generate import generate
from lm.generation.load import load
from lm.schema import Tree
from lm.storage.model_folder import read_model
from lm.training.config import TrainConfig
from lm.training.run import train_rank
from tests.training.conftest import Configure, read, results

SWITCH = {
    "kind": "moe", "n_experts": 4, "top_k": 1, "expert": {"kind": "mlp", "hidden": 24}, "router": {"kind": "softmax", "normalize": False},
    "capacity_factor": 1.0, "balance_loss": 0.1,
}  # fmt: skip
OBJECTIVE = {"encoder": "mlm", "encoder_decoder": "seq2seq"}


def of_kind(cfg: TrainConfig, kind: str, folder: Path, **changes: Tree) -> TrainConfig:
    """The run with a model of this kind and what it learns from: pairs of different lengths, or the same text."""
    model = {key: value for key, value in cfg.model.tree().items() if key != "mtp"} | {"kind": kind} | changes
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"source": "ab" * (1 + n % 9), "target": "cd" * (1 + n % 7)}) + "\n" for n in range(200)))
    data = cfg.data.tree() | ({"files": str(pairs), "record": {"kind": "pair"}} if kind == "encoder_decoder" else {})
    return cfg.replace(model=model, data=data, objective={"kind": OBJECTIVE[kind]})


@pytest.mark.slow
@pytest.mark.parametrize("kind", OBJECTIVE)
def test_the_split_into_micro_batches_changes_nothing_under_sgd(configure: Configure, tmp_path: Path, kind: str) -> None:
    """Batches are as wide as their longest row, and experts take a part of each row's own tokens."""
    for rows in (8, 2):
        cfg = configure(
            "optim=sgd", "optim.lr=0.1", "model.dropout=0", "trainer.max_steps=6", f"trainer.micro_batch={rows}", f"run.name=rows{rows}"
        )
        train_rank(of_kind(cfg, kind, tmp_path, ffn=SWITCH))
    (_, whole), (_, split) = (read_model(tmp_path / f"rows{rows}" / "model") for rows in (8, 2))
    torch.testing.assert_close(split, whole, atol=2e-5, rtol=1e-4)
    lines = [[line["loss"] for line in read(tmp_path / f"rows{rows}" / "metrics.jsonl") if "loss" in line] for rows in (8, 2)]
    assert lines[0] == pytest.approx(lines[1], rel=1e-5) and lines[0][-1] < lines[0][0] - 0.2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("encoder", marks=pytest.mark.slow), "encoder_decoder"])
def test_a_resumed_run_is_bitwise_the_run_left_alone(configure: Configure, tmp_path: Path, kind: str) -> None:
    train_rank(of_kind(configure("run.name=whole", "schedule=constant"), kind, tmp_path))
    train_rank(of_kind(configure("schedule=constant", "trainer.max_steps=5"), kind, tmp_path))
    train_rank(of_kind(configure("schedule=constant"), kind, tmp_path))
    assert results(tmp_path / "run")[0] == results(tmp_path / "whole")[0]


def test_samples_of_an_encoder_decoder_are_sources_and_answers(configure: Configure, tmp_path: Path) -> None:
    train_rank(of_kind(configure("trainer.sample_prompts=['abab']", "trainer.val_every=12"), "encoder_decoder", tmp_path))
    model, tokenizer = load(tmp_path / "run", device="cpu")
    answer = generate(model, tokenizer, "abab", max_tokens=64, temperature=0.8, top_p=0.95, seed=0)
    assert (tmp_path / "run" / "samples.md").read_text() == f"## step 12\n\n```\nabab\n```\n\n```\n{answer}\n```\n\n"


def test_an_encoder_leaves_sample_prompts_aside_and_says_so(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_rank(of_kind(configure("trainer.sample_prompts=['abab']", "trainer.max_steps=3"), "encoder", tmp_path))
    assert "trainer.sample_prompts are left aside" in capsys.readouterr().out
    assert not (tmp_path / "run" / "samples.md").exists()
