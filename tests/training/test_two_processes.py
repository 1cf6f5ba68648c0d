"""Two processes = one: the same module on the same rows under FSDP2 and ZeRO-3, on CPU with gloo. SGD shows what AdamW hides: a gradient
of the wrong scale. As a program, this file is one of the processes."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.nn.batch import Batch
from lm.nn.transformer import build_model
from lm.training.module import TrainModule
from lm.training.strategies.single import Single
from tests.training.steps import ADAMW, SGD, STEPS, UNCLIPPED, batches, config, train_steps

OPTIMIZERS: dict[str, dict[str, Any]] = {"sgd": SGD, "unclipped": UNCLIPPED, "adamw": ADAMW}
POISONED_STEP = 2


class Poisoned(TrainModule):
    """One rank's loss is not a number in one step."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.step == POISONED_STEP and self.global_rank == 1 else loss


def strategy_of(kind: str, optim: dict[str, Any], world: int) -> Single:
    if kind == "fsdp":
        from lm.training.strategies.fsdp import FSDP

        return FSDP(world)
    from lm.training.strategies.zero import Zero

    return Zero(3, optim["clip"], persistence_threshold=0)  # even the smallest weights are split


def process(kind: str, out: Path) -> None:
    """What each of the launched processes does; rank 0 writes."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    jobs = [(name, optim, TrainModule) for name, optim in OPTIMIZERS.items()] + [("poisoned", ADAMW, Poisoned)]
    for name, optim, module in jobs:
        rows = batches(rank=rank, world=world)
        record, weights = train_steps(config(optim), rows, strategy_of(kind, optim, world), module, devices=world)
        if rank == 0:
            (out / f"{name}.json").write_text(json.dumps(record))
            save_file(weights, out / f"{name}.safetensors")
    torch.distributed.destroy_process_group()


def launch(kind: str, out: Path, timeout_s: int) -> None:
    """Two processes that meet at a free port; neither outlives this call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja, which DeepSpeed calls
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "NODE_RANK": "0", "PATH": path}
    env = os.environ | shared | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    jobs: list[subprocess.Popen[bytes]] = []
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
    assert codes == [0, 0], f"exit codes {codes} (None: was still running)\n{said}"


def require_same_as_one_process(out: Path) -> None:
    for name, optim in OPTIMIZERS.items():
        cfg = config(optim)
        expected, weights = train_steps(cfg, batches())
        found = json.loads((out / f"{name}.json").read_text())
        assert found["bad_step"] == expected["bad_step"] == [-1.0] * STEPS
        for key in ("loss", "grad_norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-5), (name, key)
        torch.testing.assert_close(load_file(out / f"{name}.safetensors"), weights, rtol=1e-5, atol=1e-5)
        moved = weights["embed.weight"] - build_model(cfg.model, seed=1).embed.weight
        assert moved.abs().max() > 1e-3


def require_no_step_from_the_poisoned_one_on(out: Path) -> None:
    """Every rank sees that one rank's gradient is not finite, and leaves the weights as the steps before it made them."""
    assert json.loads((out / "poisoned.json").read_text())["bad_step"] == [-1.0, -1.0, POISONED_STEP, POISONED_STEP]
    _, weights = train_steps(config(ADAMW), batches(), steps=POISONED_STEP)
    torch.testing.assert_close(load_file(out / "poisoned.safetensors"), weights, rtol=1e-5, atol=1e-5)


def test_two_processes_under_fsdp2_train_as_one_process(tmp_path: Path) -> None:
    launch("fsdp", tmp_path, timeout_s=150)
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
