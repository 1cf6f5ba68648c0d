import re
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lm.data.loader import Steps
from lm.data.rows.causal import CausalConfig
from lm.errors import ConfigError
from lm.losses.tokens import causal_reader
from lm.nn.batch import Batch
from lm.storage.checkpoint import CheckpointReader, checkpoints
from lm.training.budget import peak_flops
from lm.training.callbacks.metrics import utilisation
from lm.training.module import TrainModule
from lm.training.objectives.base import LOSSES
from lm.training.run import train_rank
from lm.training.state import Clock, Saved
from tests.training.conftest import Configure, Stop, read


def test_peaks_are_found_by_the_names_that_cuda_reports() -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H200": 989e12,
        "NVIDIA GH200 480GB": 990e12,
        "NVIDIA L4": 121e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA GeForce RTX 4090": 165.2e12,
        "NVIDIA RTX A6000": 154.8e12,
        "Tesla T4": 65e12,
        "Tesla V100-SXM2-16GB": 125e12,
        "Tesla V100-PCIE-32GB": 112e12,
    }
    assert {name: peak_flops(name) for name in names} == names


@pytest.mark.parametrize(
    "name", ["AMD EPYC", "NVIDIA T400 4GB", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", ""]
)
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert peak_flops(name) is None


@pytest.mark.slow
def test_memory_is_what_this_process_allocates_and_not_the_one_that_started_it() -> None:
    """Seen to fail: by ru_maxrss."""
    asked = (
        "import torch; from lm.training.callbacks.metrics import memory_gib; here = torch.device('cpu')\n"
        "before = memory_gib(here); block = torch.ones(2**26); print(before, memory_gib(here) - before)"
    )
    large = "import subprocess, sys; held = b'x' * 2**30; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    done = subprocess.run([sys.executable, "-c", large, asked], capture_output=True, text=True, check=True)
    before, more = map(float, done.stdout.split())
    assert 0.1 < before < 0.9 and 0.2 < more < 0.3


def test_the_share_of_the_peak_is_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: two GPUs took twice their part."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    run = SimpleNamespace(tokens=lambda steps: 1000 * steps, clock=SimpleNamespace(step_s=0.5, steps=2))
    module: Any = SimpleNamespace(step=4, device=torch.device("cuda"), run=run, counts=SimpleNamespace(train_flops_per_token=989e9))
    trainers: list[Any] = [SimpleNamespace(world_size=n) for n in (1, 2)]
    assert [utilisation(trainer, module) for trainer in trainers] == [{"mfu_pct": 200.0}, {"mfu_pct": 100.0}]


@pytest.mark.parametrize(
    ("name", "figure", "said"),
    [
        ("loss", torch.tensor([6.0, 2.0]), "objective: 'loss' is in each line of metrics already"),
        ("lr", torch.tensor([6.0, 2.0]), "objective: 'lr' is in each line of metrics already"),
        ("kl", torch.tensor(6.0), "objective: its metric 'kl' is no pair"),
        ("kl", 6.0, "objective: its metric 'kl' is no pair"),
    ],
)
def test_a_figure_of_the_objective_replaces_none_of_ours(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, name: str, figure: torch.Tensor, said: str
) -> None:
    """Seen to fail: the figure stood in metrics.jsonl as the loss, or was lost without a word."""

    def build(cfg: Any, run: Any) -> Any:
        return lambda model, batch, step, first_row: replace(model(batch, read=causal_reader(batch.labels)), metrics={name: figure})

    monkeypatch.setitem(LOSSES, CausalConfig, build)
    with pytest.raises(ConfigError, match=re.escape(said)):
        train_rank(configure())


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_the_rate_is_not_that_of_a_group_with_its_own(configure: Configure, tmp_path: Path, optim: str) -> None:
    """Seen to fail: that of the norms, which were the last group."""
    more = ("optim.lr=0.004", "optim.groups=[{match:norm,lr:0.0007}]", "schedule=constant", "schedule.warmup_steps=0")
    train_rank(configure(f"optim={optim}", *more, "trainer.max_steps=2"))
    assert {line["lr"] for line in read(tmp_path / "run" / "metrics.jsonl") if "lr" in line} == {0.004}


@pytest.mark.slow
@pytest.mark.parametrize("waiting_s", [0.0, 0.3])
def test_time_spent_waiting_for_batches_is_told(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], waiting_s: float
) -> None:
    of_step = Steps.__getitem__

    def slow(steps: Steps, step: int) -> list[Batch]:
        time.sleep(waiting_s)
        return of_step(steps, step)

    monkeypatch.setattr(Steps, "__getitem__", slow)
    train_rank(configure("trainer.max_steps=3", "trainer.log_every=1", "trainer.val_every=100"))
    lines = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "data_s" in line]
    assert len(lines) == 3 and all(waiting_s < line["data_s"] < line["step_s"] for line in lines)
    told = capsys.readouterr().out.count("waiting for batches: data.workers=2 may help")
    starved = [line["data_s"] > 0.2 * line["step_s"] for line in lines]
    assert told == any(one and other for one, other in pairwise(starved)) and told >= (waiting_s > 0)


def test_steps_between_the_last_line_and_a_stop_count_as_time_spent(
    configure: Configure, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: they took none, so that a run stopped twice told five times its speed, and trainer.max_minutes left them out."""
    own = TrainModule.training_step

    def slow(module: TrainModule, *args: Any) -> torch.Tensor:
        time.sleep(0.05)
        return own(module, *args)

    monkeypatch.setattr(TrainModule, "training_step", slow)
    cfg = configure("trainer.log_every=10", "checkpoint.every=4")
    stop(cfg, 9)
    newest = checkpoints(cfg.run.folder / "checkpoints")[0]
    assert Saved.of(CheckpointReader(newest)).counters.train_s > 9 * 0.05
    assert 12 * 0.05 < train_rank(cfg)["train_s"] < 12


def test_seconds_that_a_save_has_told_are_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, times = Clock(), iter([0.0, 3.0, 5.0, 9.0, 10.0])
    monkeypatch.setattr("lm.training.state.time.perf_counter", lambda: next(times))
    clock.start(0)
    assert (clock.passed(), clock.passed(), clock.lap(3, {}), clock.passed()) == (3.0, 2.0, 4.0, 1.0)
    assert clock.step_s == 3.0
