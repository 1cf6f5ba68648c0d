"""`lm train check=true`: what the real run would meet is met in seconds, and nothing of it stays."""

from pathlib import Path

import pytest

from lm.cli.main import main
from lm.training import check as checking
from tests.training.conftest import Configure, ranks


def test_a_check_tries_everything_once_and_leaves_nothing(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(tmp_path.iterdir())
    assert main(["train", *tiny, "check=true", "trainer.sample_prompts=['def ']", "trainer.ema_decay=0.9"]) == 0
    out = capsys.readouterr().out
    assert "resumes at step 1" in out and out.count("  validation") == 2
    assert "3 checkpoints of" in out and "by formula its tensors are" in out and out.rstrip().endswith("the run can start")
    assert set(tmp_path.iterdir()) - before == {tmp_path / "cache"}


@pytest.mark.slow
def test_a_check_uses_the_real_strategy(tiny: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *tiny, "check=true", "optim=adamw", *ranks("fsdp")]) == 0
    assert capfd.readouterr().out.count("(1 x 4 rows)") == 2


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
        return checking.estimate(cfg, cfg.model.replace(vocab_size=320, max_seq_len=32).tree()).optimizer

    whole = total()
    assert total(*ranks("ddp")) == whole
    assert all(total(*ranks(kind)) == -(-whole // 2) for kind in ("zero1", "zero2", "zero3", "fsdp"))
