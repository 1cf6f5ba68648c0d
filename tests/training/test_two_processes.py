"""Two processes = one: the same module, the same rows, under FSDP2 and ZeRO-3 on CPU with gloo. SGD shows what AdamW hides: a gradient
of the wrong scale. As a program, this file is one of the processes."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from lm.config import from_tree
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import build_model
from lm.training.config import TrainConfig
from lm.training.module import TrainModule
from lm.training.optim import build_optimizer
from lm.training.strategies.single import Single

STEPS, ACCUMULATION, ROWS, LENGTH, VOCAB = 4, 2, 8, 12, 61
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "sgd", "lr": 0.5, "clip": 1.0},
    "sgd_unclipped": {"kind": "sgd", "lr": 0.1, "clip": None},
    "adamw": {"kind": "adamw", "lr": 1e-2, "clip": 0.5},
}
POISONED_STEP = 2
Record = dict[str, list[float]]


class Poisoned(TrainModule):
    """One rank's loss is not a number in one step."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.step == POISONED_STEP and self.global_rank == 1 else loss


def config(optim: dict[str, Any]) -> TrainConfig:
    model = {
        "vocab_size": VOCAB, "max_seq_len": LENGTH, "d_model": 32, "n_layers": 2, "norm": {"kind": "rms"}, "position": {"kind": "rope"},
        "attention": {"n_heads": 4, "n_kv_heads": 2, "qkv_bias": True, "qk_norm": "head"}, "ffn": {"hidden": 40}, "tied_head": True,
    }  # fmt: skip
    tree = {
        "run": {"name": "two"}, "model": model, "tokenizer": {"kind": "bytes"}, "data": {"kind": "stdlib", "global_batch": ROWS, "seq_len": LENGTH},
        "objective": {"chunk": 7}, "optim": optim, "schedule": {"kind": "linear", "warmup_steps": 1},
        "trainer": {"max_steps": STEPS, "device": "cpu"},
    }  # fmt: skip
    return from_tree(TrainConfig, tree)


def batches(rank: int, world: int) -> list[Batch]:
    """This rank's micro-batches; row i has i + 2 label tokens, so ranks and micro-batches weigh differently."""
    source = torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=source)
        labels = tokens.roll(-1, 1).masked_fill(torch.arange(LENGTH) >= torch.arange(ROWS)[:, None] + 2, IGNORED)
        mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
        n = int((labels[mine] != IGNORED).sum())
        parts = zip(tokens[mine].chunk(ACCUMULATION), labels[mine].chunk(ACCUMULATION), strict=True)
        found += [Batch(t, y, step_tokens=n) for t, y in parts]
    return found


def run(
    optim: dict[str, Any], strategy: Single, rank: int = 0, world: int = 1, kind: type[TrainModule] = TrainModule, steps: int = STEPS
) -> tuple[Record, dict[str, torch.Tensor]]:
    """Losses and norms of every step, and the weights after the last, whole."""
    torch.manual_seed(0)
    cfg = config(optim)
    model = build_model(cfg.model, seed=1)
    record: Record = {"loss": [], "grad_norm": [], "bad_step": []}

    def after_step() -> bool:
        for name, value in (("loss", module.loss()), ("grad_norm", module.grad_norm), ("bad_step", module.bad_step)):
            record[name].append(float(value))
        return module.step == steps

    def build() -> torch.optim.Optimizer:
        return build_optimizer(cfg.optim, model.named_parameters(), model.matrices())

    module = kind(cfg, model, build, after_step, lambda: None, strategy=strategy)
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=strategy.lightning(), max_epochs=1, accumulate_grad_batches=ACCUMULATION, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(batches(rank, world), batch_size=None, collate_fn=lambda batch: batch))  # type: ignore[arg-type]
    return record, {name: strategy.whole(p).clone() for name, p in model.named_parameters()}


def strategy_of(kind: str, optim: dict[str, Any], world: int) -> Single:
    if kind == "fsdp":
        from lm.training.strategies.fsdp import FSDP

        return FSDP(world)
    from lm.training.strategies.zero import Zero

    return Zero(3, optim["clip"], persistence_threshold=0)


def process(kind: str, out: Path) -> None:
    """What each of the launched processes does; rank 0 writes."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    jobs = [(name, optim, TrainModule) for name, optim in OPTIMIZERS.items()] + [("poisoned", OPTIMIZERS["adamw"], Poisoned)]
    for name, optim, module in jobs:
        record, weights = run(optim, strategy_of(kind, optim, world), rank, world, module)
        if rank == 0:
            (out / f"{name}.json").write_text(json.dumps(record))
            save_file(weights, out / f"{name}.safetensors")
    torch.distributed.destroy_process_group()


def launch(kind: str, out: Path, timeout_s: int) -> None:
    """Two processes that meet at a free port; none outlives this call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja, which DeepSpeed calls
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "NODE_RANK": "0", "PATH": path}
    env = os.environ | shared | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    jobs = []
    try:
        for rank in ("0", "1"):
            with (out / f"rank{rank}.log").open("w") as log:
                command = [sys.executable, __file__, kind, str(out)]
                jobs.append(subprocess.Popen(command, env=env | {"RANK": rank, "LOCAL_RANK": rank}, stdout=log, stderr=log))
        deadline = time.monotonic() + timeout_s
        while any(job.poll() is None for job in jobs) and not any(job.poll() for job in jobs) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        codes = [job.poll() for job in jobs]
        for job in jobs:
            job.kill()
            job.wait()
    said = "\n".join((out / f"rank{rank}.log").read_text()[-3000:] for rank in range(len(jobs)))
    assert codes == [0, 0], f"exit codes {codes} (None: still running after {timeout_s} s)\n{said}"


def require_same_as_one_process(out: Path) -> None:
    for name, optim in OPTIMIZERS.items():
        expected, weights = run(optim, Single())
        found = json.loads((out / f"{name}.json").read_text())
        assert found["bad_step"] == expected["bad_step"] == [-1.0] * STEPS
        for key in ("loss", "grad_norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-5), (name, key)
        torch.testing.assert_close(load_file(out / f"{name}.safetensors"), weights, rtol=1e-5, atol=1e-5)
        start = build_model(config(optim).model, seed=1).embed.weight
        assert (weights["embed.weight"] - start).abs().max() > 1e-3


def require_no_step_from_the_poisoned_one_on(out: Path) -> None:
    """Every rank sees that one rank's gradient is not finite, and leaves the weights as the steps before it made them."""
    assert json.loads((out / "poisoned.json").read_text())["bad_step"] == [-1.0, -1.0, POISONED_STEP, POISONED_STEP]
    _, weights = run(OPTIMIZERS["adamw"], Single(), steps=POISONED_STEP)
    torch.testing.assert_close(load_file(out / "poisoned.safetensors"), weights, rtol=1e-5, atol=1e-5)


def test_two_processes_under_fsdp2_train_as_one_process(tmp_path: Path) -> None:
    launch("fsdp", tmp_path, timeout_s=120)
    require_same_as_one_process(tmp_path)
    require_no_step_from_the_poisoned_one_on(tmp_path)


@pytest.mark.slow  # DeepSpeed compiles its shared-memory collectives at the first start
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install slotlm[deepspeed]")
def test_two_processes_under_zero3_train_as_one_process(tmp_path: Path) -> None:
    launch("zero", tmp_path, timeout_s=300)
    require_same_as_one_process(tmp_path)
    require_no_step_from_the_poisoned_one_on(tmp_path)


if __name__ == "__main__":
    process(sys.argv[1], Path(sys.argv[2]))
