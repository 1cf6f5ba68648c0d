import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.cli.train import compose_config
from lm.training.config import TrainConfig
from lm.training.metrics import read

Configure = Callable[..., TrainConfig]
WORDS = "def return import class self value for in while if else none model data token print read".split()
TINY = (
    *("model=nano", "model.d_model=32", "model.n_layers=1", "model.attention.n_heads=2", "model.ffn.hidden=64", "model.dropout=0.1"),
    *("tokenizer=bytes", "data=text", "data.seq_len=32", "data.global_batch=8", "trainer.max_steps=12", "trainer.log_every=1"),
    *("trainer.val_every=4", "data.val_rows=8", "checkpoint.every=4", "schedule.warmup_steps=2", "trainer.device=cpu"),
    *("trainer.sample_prompts=[]", "run.name=run"),
)


def write_text(path: Path, lines: int = 50, seed: int = 0) -> Path:
    """50 lines give 8 steps an epoch."""
    draw = random.Random(seed)
    path.write_text("\n".join(" ".join(draw.choices(WORDS, k=8)) for _ in range(lines)), encoding="utf-8")
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Overrides of `lm train` for a run of a second in `tmp_path`/run."""
    text = write_text(tmp_path / "text.txt")
    return [*TINY, f"run.dir={tmp_path}", f"data.files={text}", f"data.cache_dir={tmp_path / 'cache'}"]


@pytest.fixture
def configure(tiny: list[str]) -> Configure:
    """The config of that run with more overrides."""

    def run(*overrides: str) -> TrainConfig:
        return compose_config([*tiny, *overrides])

    return run


def results(run: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """What a resumed run must share with one that was left alone: the model's bytes, and the metrics but for timing and memory."""
    weights = (run / "model" / "model.safetensors").read_bytes()
    timing = ("tokens_per_second", "step_s", "memory_gib")
    return weights, [{key: value for key, value in line.items() if key not in timing} for line in read(run / "metrics.jsonl")]
