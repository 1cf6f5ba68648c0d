"""Run folders as training writes them, with smooth invented curves."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm.schema import Tree
from lm.storage.atomic import atomic_folder
from lm.storage.checkpoint import Piece, bytes_of, write_meta, write_pieces

SAMPLES = """# Samples

## step 100

> def main(

def main(self, x): return <b>x</b>

## step 200

> import os

import os & sys
"""


def _config(name: str, seed: int = 0, ffn: str = "swiglu", steps: int = 200) -> dict[str, Any]:
    return {
        "run": {"name": name, "dir": "runs"},
        "seed": seed,
        "model": {"kind": "decoder", "d_model": 64, "ffn": {"kind": "mlp", "activation": ffn}, "max_seq_len": None},
        "tokenizer": {"kind": "bpe", "vocab_size": 4096},
        "data": {"kind": "stdlib", "seq_len": 256, "global_batch": 8, "cache_dir": "~/.cache/lm"},
        "optim": {"kind": "adamw", "lr": 1e-3},
        "trainer": {"max_steps": steps, "sample_prompts": ["def main(", "<script>alert(1)</script>"]},
        "logger": {"kind": "jsonl"},
    }


def _metrics(final: float = 1.6, steps: int = 200) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        loss = final * 2 + 6 * math.exp(-step / 30)
        speed = {"tokens_per_second": 9000.0 + 50 * math.sin(step), "step_s": 0.22, "memory_gib": 0.8}
        noise = 0.15 * math.sin(7 * step)
        at = {"step": step, "tokens": step * 2048}
        lines.append({**at, "loss": loss + noise, "lr": 1e-3 * (1 - step / steps), "grad_norm": 1 + noise, **speed})
        if step % 50 == 0 or step == steps:
            lines.append({**at, "val_loss": loss, "val_bits_per_byte": loss / 2})
    return lines


def _summary(name: str, lines: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    last = lines[-1]
    sizes = {"parameters": 3285504, "parameters_non_embedding": 2236928, "flops_per_token": 21200000, "cache_bytes_per_token": 6144}
    result = {"val_loss": last["val_loss"], "val_bits_per_byte": last["val_bits_per_byte"], "zlib_bits_per_byte": 1.9031}
    speed = {"tokens_per_second": 9012.0, "train_s": 151.2, "device": "cpu", "torch": "2.13.0", "python": "3.11.7"}
    length = {"steps": last["step"], "tokens": last["tokens"]}
    return {"name": name, **sizes, **length, **result, **speed, "parent": None, "version": "0.1.0", **changes}


def _write_run(
    folder: Path, seed: int = 0, ffn: str = "swiglu", final: float = 1.6, steps: int = 200, finished: bool = True, **summary_changes: Any
) -> Path:
    """`finished` false: a run killed half way, with neither summary nor samples."""
    lines = _metrics(final, steps)
    lines = lines if finished else lines[: len(lines) // 2]
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(_config(folder.name, seed, ffn, steps), sort_keys=False))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (folder / "summary.json").write_text(json.dumps(_summary(folder.name, lines, **summary_changes)))
        (folder / "samples.md").write_text(SAMPLES)
    return folder


@pytest.fixture
def write_run() -> Callable[..., Path]:
    return _write_run


def save_checkpoint(
    folder: Path, pieces: Iterable[Piece], meta: Tree, save_tokenizer: Callable[[Path], None] = lambda folder: None
) -> None:
    """Writes a whole checkpoint from one process, as training does from many."""
    pieces = list(pieces)
    with atomic_folder(folder, bytes_of(pieces)) as temporary:
        write_pieces(temporary, pieces)
        write_meta(temporary, meta)
        save_tokenizer(temporary)


def older(config: Tree) -> Tree:
    """A config as it was saved before `trainer.recompute`."""
    trainer = {key: value for key, value in config["trainer"].items() if not key.startswith("recompute")}
    blocks = config["trainer"]["recompute_every"] if config["trainer"]["recompute"] == "block" else None
    return config | {"trainer": trainer | {"checkpoint_blocks": blocks}}
