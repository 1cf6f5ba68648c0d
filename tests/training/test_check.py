"""`lm train check=true`: what the real run would meet is met in seconds, and nothing of it stays."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.cli.main import main
from lm.nn.batch import Batch
from lm.training.check import check
from lm.training.config import TrainConfig
from lm.training.module import TrainModule
from lm.training.plan import estimate
from lm.training.run import train_rank
from tests.training.conftest import Configure, ranks, settled


def test_a_check_tries_everything_once_and_leaves_nothing(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(tmp_path.iterdir())
    assert main(settled("train", *tiny, "check=true", "trainer.sample_prompts=['def ']", "trainer.ema_decay=0.9", "budget.price=2")) == 0
    out = capsys.readouterr().out
    assert "resumes at step 1" in out and out.count("  validation") == 2
    thousands, told = (
        re.search(pattern, out) for pattern in (r"([\d.]+) k parameters", r"3,072 tokens in 12 steps are ([\d.]+) a parameter")
    )
    assert thousands and told and float(told[1]) == pytest.approx(3.072 / float(thousands[1]), rel=0.01)
    assert out.startswith("plan: ") and "check: 12 steps take " in out and "GPU-hours at 2: " in out
    assert "3 checkpoints of" in out and "by formula its tensors are" in out
    assert out.rstrip().endswith("validated and sampled; the run can start")
    assert set(tmp_path.iterdir()) - before == {tmp_path / "cache"}


def test_a_check_takes_a_second_step_that_is_worse_than_the_first(configure: Configure) -> None:
    """Seen to fail: the better checkpoint was kept beside the newest, which ended as a bug of lm's; and early_stop ended the trial."""
    said: list[str] = []
    worse = ("checkpoint.best=true", "trainer.early_stop=1", "optim.lr=100", "optim.clip=null")
    check(configure(*worse), train_rank, said.append)
    assert any(line.startswith("check: step 2 has loss") for line in said) and said[-1].endswith("the run can start")


def test_a_check_of_a_run_that_must_resume_begins_its_trial_from_nothing(configure: Configure) -> None:
    """Seen to fail: the trial, in a folder of its own, had no checkpoint to resume from."""
    said: list[str] = []
    check(configure("resume.mode=must"), train_rank, said.append)
    assert said[-1].endswith("the run can start")


def test_one_machine_alone_tells_and_removes_what_all_have_tried(configure: Configure, tmp_path: Path) -> None:
    """Seen to end as a bug on the machine that came 0.15 s later."""
    said: list[str] = []

    def run(cfg: TrainConfig) -> None:  # as on two machines, of which the other has ended before
        train_rank(cfg)
        if cfg.trainer.max_steps == 2:
            cfg.run.folder.parent.rename(tmp_path / "another's")

    check(configure(), run, said.append)
    assert said[-1] == "check: the run was tried; another of its machines tells what was found"


def test_the_first_forward_of_a_check_is_the_widest_micro_batch(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that memory runs out at once, if it does. One pair of 400 is longer than all others; accumulation is 2."""
    pairs = [{"source": "ab" * (30 if n == 317 else 1 + n % 5), "target": "cd" * (20 if n == 317 else 1)} for n in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    shapes: list[tuple[int, ...]] = []
    own = TrainModule.training_step

    def step(module: TrainModule, batch: Batch, *args: Any) -> torch.Tensor:
        assert batch.source_tokens is not None
        shapes.append((*batch.source_tokens.shape, *batch.tokens.shape))
        return own(module, batch, *args)

    monkeypatch.setattr(TrainModule, "training_step", step)
    small = [given for given in tiny if not given.startswith(("model", "data.files", "data.seq_len"))]
    model = ["model=t5_tiny", "model.d_model=32", "model.n_layers=1", "model.attention.n_heads=2", "model.ffn.hidden=64"]
    data = ["data=pairs", f"data.files={tmp_path / 'a.jsonl'}", "data.seq_len=64", "objective=seq2seq"]
    assert main(settled("train", *small, *model, *data, "trainer.micro_batch=4", "optim=adamw", "check=true")) == 0
    assert shapes[0] == shapes[2] == (4, 64, 4, 48) and max(shapes[1], shapes[3]) < (4, 32, 4, 32)
    assert "the run can start" in capsys.readouterr().out


@pytest.mark.slow
def test_a_check_uses_the_real_strategy(tiny: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """And is over within a minute."""
    begun = time.monotonic()
    assert main(["train", *tiny, "check=true", "optim=adamw", *ranks("fsdp")]) == 0
    out = capfd.readouterr().out
    assert out.count("(1 x 4 rows)") == 2 and "memory of the largest of 2 ranks is" in out
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    ("device", "held"),
    [
        ("cpu", "at its peak, with the program itself"),
        ("cuda", "at its peak, with what torch keeps for later"),
        ("mps", "reserved on the GPU"),
    ],
)
def test_a_check_tells_whose_memory_it_is(
    device: str, held: str, tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU's is torch's alone."""
    monkeypatch.setattr("lm.training.check.device_kind", lambda name, devices: device)
    assert main(["train", *tiny, "check=true"]) == 0
    assert f"{held}; by formula" in capsys.readouterr().out


def test_a_disk_too_small_for_the_checkpoints_is_told_by_the_check(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *tiny, "check=true", "checkpoint.keep_last=1000000000"]) == 5
    assert "no space left" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.glob(".*"))


def test_what_would_end_the_run_ends_the_check(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *tiny, "check=true", "optim=sgd", "optim.lr=1e30"]) == 4
    assert "only finite steps are taken" in capsys.readouterr().err.splitlines()[-1]


def test_the_estimate_follows_the_strategy(configure: Configure) -> None:
    def total(*overrides: str) -> int:
        cfg = configure("optim=adamw", *overrides)
        return estimate(cfg, cfg.model.replace(vocab_size=320, max_seq_len=32)).optimizer

    whole = total()
    assert total(*ranks("ddp")) == whole
    assert all(total(*ranks(kind)) == -(-whole // 2) for kind in ("zero1", "zero2", "zero3", "fsdp"))
    assert total(*ranks("fsdp", 8, shard=4)) == -(-whole // 4)


def test_the_estimate_of_a_rank_with_half_of_each_row_is_half_the_activations(configure: Configure) -> None:
    """And what the exchange keeps."""

    def activations(*overrides: str) -> int:
        cfg = configure("optim=adamw", *overrides)
        return estimate(cfg, cfg.model.replace(vocab_size=320, max_seq_len=32)).activations

    whole = activations()
    assert 0.5 * whole < activations(*ranks("ddp", 2, 2)) < 0.58 * whole
    assert activations(*ranks("ddp", 2)) == 0.5 * whole  # of as many rows
    assert activations(*ranks("ddp", 2, 2)) < activations(*ranks("fsdp", 2, tensor=2)) < 0.68 * whole  # both sublayers read whole rows
