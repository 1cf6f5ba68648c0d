"""Attention to what an indexer chooses, in real steps: what its loss adds, and that it learns what is read."""

from pathlib import Path

import pytest
import torch

from lm.storage.model_folder import read_model
from lm.training.config import TrainConfig
from lm.training.run import train_rank
from tests.training.conftest import Configure, read

INDEXER = {"n_heads": 3, "head_dim": 16, "top_k": 4}
PLAIN = ("model.dropout=0", "checkpoint.every=8", "schedule.warmup_steps=1", "optim=sgd", "optim.lr=0.5", "optim.clip=1e6")


def choosing(cfg: TrainConfig) -> TrainConfig:
    model = cfg.model.tree()
    return cfg.replace(model=model | {"attention": model["attention"] | {"indexer": INDEXER}})


def test_the_split_into_micro_batches_changes_nothing(configure: Configure, tmp_path: Path) -> None:
    for rows in (8, 2):
        train_rank(choosing(configure(*PLAIN, f"trainer.micro_batch={rows}", f"run.name=rows{rows}", "trainer.max_steps=3")))
    whole, split = (read_model(tmp_path / f"rows{rows}" / "model")[1] for rows in (8, 2))
    torch.testing.assert_close(split, whole, atol=1e-5, rtol=1e-4)
    lines = [read(tmp_path / f"rows{rows}" / "metrics.jsonl")[0] for rows in (8, 2)]
    for name in ("loss", "indexer_loss", "grad_norm"):
        assert lines[0][name] == pytest.approx(lines[1][name], rel=1e-4) and lines[0][name] > 0


def test_it_learns_what_is_read_and_the_model_nothing_of_its_loss(configure: Configure, tmp_path: Path) -> None:
    """With every key shown, the model is the one without an indexer."""
    cfg = configure(*PLAIN, "trainer.max_steps=8", "run.name=plain")
    train_rank(cfg)
    wide = choosing(configure(*PLAIN, "trainer.max_steps=8", "run.name=chosen"))
    attention = wide.model.attention.tree()
    train_rank(wide.replace(model=wide.model.tree() | {"attention": attention | {"indexer": INDEXER | {"top_k": 10**6}}}))
    plain, chosen = (read_model(tmp_path / name / "model")[1] for name in ("plain", "chosen"))
    assert plain.keys() < chosen.keys()
    torch.testing.assert_close({name: chosen[name] for name in plain}, plain, atol=1e-6, rtol=1e-5)
    losses = [line["indexer_loss"] for line in read(tmp_path / "chosen" / "metrics.jsonl") if "indexer_loss" in line]
    assert len(losses) == 8 and losses[-1] < 0.9 * losses[0]
