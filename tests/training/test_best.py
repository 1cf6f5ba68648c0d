"""checkpoint.best: what is handed on is the model of the best validation, whatever came after it, and however often the run was stopped."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lm.cli.compose.compose import compose_config
from lm.errors import CheckpointError, ConfigError, LmError
from lm.generation.examine import evaluate
from lm.storage.checkpoint import CheckpointReader, checkpoints, step_folder, step_of
from lm.training.config import TrainConfig
from lm.training.run import train_rank
from tests.training.conftest import Before, Configure, read, results
from tests.training.test_finetune import child

WORSENS = [  # a rate that grows until it is far too high
    *("checkpoint.best=true", "checkpoint.keep_last=1", "trainer.max_steps=20"),
    *("schedule=constant", "schedule.warmup_steps=19", "optim=adamw", "optim.lr=2"),
]


def stop(cfg: TrainConfig, step: int) -> None:
    """By a SIGTERM, which the run answers behind this step."""
    with pytest.raises(LmError, match="SIGTERM"):
        train_rank(cfg, callbacks=[Before(step, lambda module: os.kill(os.getpid(), signal.SIGTERM))])


def best(run: Path) -> dict[str, Any]:
    lines = [line for line in read(run / "metrics.jsonl") if "val_loss" in line]
    found = min(lines, key=lambda line: line["val_loss"])
    assert found is not lines[-1], "the last validation is the best: blind"
    return found


def test_the_model_is_that_of_the_best_validation_and_its_checkpoint_is_kept(configure: Configure, tmp_path: Path) -> None:
    cfg = configure(*WORSENS)
    summary, run = train_rank(cfg), tmp_path / "run"
    found = best(run)
    told = {key: summary[key] for key in ("steps", "model_step", "val_loss", "val_bits_per_byte")}
    assert told == {"steps": 20, "model_step": found["step"]} | {key: found[key] for key in ("val_loss", "val_bits_per_byte")}
    assert [step_of(path) for path in checkpoints(run / "checkpoints")] == [20, found["step"]]
    reader = CheckpointReader(step_folder(run / "checkpoints", found["step"]))
    model = load_file(run / "model" / "model.safetensors")
    assert all((reader.read(name, "weight") == tensor).all() for name, tensor in model.items())
    loss = evaluate(run / "model", cfg.data, cfg.objective, split="val", micro_batch=8, device="cpu", log=print)["val_loss"]
    assert loss == pytest.approx(found["val_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_run_that_was_stopped_behind_its_best_validation_hands_the_same_model_on(configure: Configure, tmp_path: Path) -> None:
    train_rank(configure(*WORSENS, "run.name=whole"))
    step = best(tmp_path / "whole")["step"]
    stop(configure(*WORSENS), step + 2)
    stop(configure(*WORSENS), step + 6)
    assert train_rank(configure(*WORSENS))["model_step"] == step
    assert results(tmp_path / "run") == results(tmp_path / "whole")


def test_a_best_checkpoint_that_is_damaged_is_not_handed_on(configure: Configure, tmp_path: Path) -> None:
    """Seen to be handed on with another bit in a weight, in silence."""
    cfg = configure(*WORSENS)
    stop(cfg, 14)
    reader = CheckpointReader(checkpoints(tmp_path / "run" / "checkpoints")[0])
    file = step_folder(tmp_path / "run" / "checkpoints", reader.meta["counters"]["best_step"]) / "rank-00000.weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 64
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors: the file is damaged.* checkpoint\.best=false hands the last on"):
        train_rank(cfg)
    assert train_rank(cfg.replace(checkpoint=cfg.checkpoint.replace(best=False)))["model_step"] == 20


@pytest.mark.slow
def test_a_parent_that_no_step_makes_better_is_handed_on(configure: Configure, tmp_path: Path) -> None:
    train_rank(configure("trainer.max_steps=6", "run.name=parent"))
    worse = ["checkpoint.best=true", "optim.lr=30", "schedule=constant", "trainer.val_every=1"]
    summary = train_rank(compose_config(child(tmp_path / "parent", *worse)))
    models = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("parent", "child")]
    assert summary["model_step"] == 0 and all((models[0][name] == models[1][name]).all() for name in models[0])


def test_a_test_of_other_weights_than_those_handed_on_is_refused(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.best: the test is of the last weights.* Drop one"):
        train_rank(configure("checkpoint.best=true", "data.test_frac=0.5"))


@pytest.mark.slow
def test_a_run_that_goes_on_without_wanting_the_best_hands_the_last_on(configure: Configure, tmp_path: Path) -> None:
    train_rank(configure(*WORSENS))
    summary = train_rank(configure(*WORSENS, "checkpoint.best=false", "trainer.max_steps=22"))
    assert summary["model_step"] == 22
    assert summary["val_loss"] == [line["val_loss"] for line in read(tmp_path / "run" / "metrics.jsonl") if "val_loss" in line][-1]
