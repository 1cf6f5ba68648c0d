"""`trainer.device=mps`: on a Mac's GPU where there is one, else on that of tools/mac.py."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lm.ops.defaults import why_not_mac
from tests.training.conftest import TINY, read, results, settled, write_text

HERE = torch.backends.mps.is_available()
WHY_NOT = why_not_mac() if HERE else None if shutil.which("g++") else "needs a Mac or g++"
START = [sys.executable, "-m", "lm"] if HERE else [sys.executable, str(Path(__file__).parents[2] / "tools" / "mac.py")]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


def lm(folder: Path, *args: str, **env: str) -> tuple[int, str]:
    """The exit code and what is printed."""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*START, *settled(*args)], cwd=folder, env=os.environ | {"PYTHONPATH": root} | env, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    assert "ightning" not in done.stderr  # which asks for the GPU wherever there is one
    return done.returncode, done.stdout


@pytest.mark.parametrize("precision, near", [("fp32", 1e-4), ("bf16-mixed", 1e-2), ("fp16-mixed", 1e-2)])
def test_a_run_is_as_on_the_cpu_and_a_killed_one_goes_on_to_the_bit(precision: str, near: float, tmp_path: Path) -> None:
    """With dropout and Muon.  Seen to fail: torch's norms refused their foreach and dtype forms, and sums were of float64."""
    write_text(tmp_path / "text.txt")
    more = ["optim=muon", "optim.lr=0.01", "trainer.ema_decay=0.9"]
    tiny = [*TINY, *more, f"run.dir={tmp_path}", "data.files=text.txt", f"trainer.precision={precision}"]
    for name, device, dropout in (("cpu", "cpu", 0), ("same", "mps", 0), ("alone", "mps", 0.1)):
        assert lm(tmp_path, "train", *tiny, f"run.name={name}", f"trainer.device={device}", f"model.dropout={dropout}")[0] == 0
    killed = [*tiny, "run.name=killed", "trainer.device=mps"]
    assert lm(tmp_path, "train", *killed, LM_FAILPOINT="renamed:kill")[0] == -signal.SIGKILL
    assert lm(tmp_path, "train", *killed)[0] == 0
    if not HERE:  # where an embedding's gradient is summed in no fixed order
        assert results(tmp_path / "killed") == results(tmp_path / "alone")
    for names in (("cpu", "same"), ("alone", "killed")):
        expected, found = (read(tmp_path / name / "metrics.jsonl") for name in names)
        for key in ("loss", "val_loss"):
            assert [line[key] for line in found if key in line] == pytest.approx([line[key] for line in expected if key in line], rel=near)


def test_text_is_continued_as_on_the_cpu(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    lm(tmp_path, "train", *TINY, f"run.dir={tmp_path}", "data.files=text.txt", "run.name=run", "trainer.device=mps")
    filters = ["seed=1", "top_k=9", "top_p=0.9", "min_p=0.01", "repetition_penalty=1.1", "no_repeat_ngram=4", "cache=int8"]
    greedy = (["temperature=0"], ["beams=2", "temperature=0"], ["lookup=2", "temperature=0"])
    for how in (*greedy, ["seed=3", "temperature=1.0", "n=2"], filters):
        said = [lm(tmp_path, "generate", "from=run", f"device={device}", "prompt=data", *how)[1] for device in ("mps", "cpu")]
        assert said[0] == said[1] != ""
    told = [lm(tmp_path, "eval", "from=run", f"device={device}")[1] for device in ("mps", "cpu")]
    assert told[0] == told[1] != ""
