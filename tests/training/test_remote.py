"""Training on tokens that are kept at a URL: the bits of a training on a folder, through kills and beside others."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lm.cli.main import main
from tests.data.store.served import served
from tests.training.conftest import TINY, settled, write_text


def run_of(folder: Path, name: str, cache: str, *more: str) -> list[str]:
    place = (f"run.dir={folder}", f"run.name={name}", f"data.files={folder / 'text.txt'}", f"data.cache_dir={folder / cache}")
    return settled("train", *TINY, *place, *more)


def bits(folder: Path, name: str) -> bytes:
    return (folder / name / "model" / "model.safetensors").read_bytes()


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The folder behind a URL, with the tokens of text.txt, of which the training shard has 110 KB; and a run `alone` on a folder."""
    write_text(tmp_path / "text.txt", lines=1500)
    assert main(run_of(tmp_path, "alone", "one", f"data.remote=file://{tmp_path}/kept")) == 0
    return tmp_path / "kept"


@pytest.mark.slow
def test_what_is_kept_at_a_url_trains_as_a_folder_does(kept: Path, tmp_path: Path) -> None:
    """Two ranks, and loader processes, each of which finds the shard missing."""
    with served(kept, tmp_path / "slow") as server:
        (tmp_path / "slow").touch()
        remote = f"data.remote={server.url}"
        assert main(run_of(tmp_path, "loaded", "two", remote, "data.workers=2")) == 0
        assert main(run_of(tmp_path, "ranks", "three", remote, "launch.devices=2", "strategy=ddp")) == 0
        assert main(run_of(tmp_path, "alone2", "one", "launch.devices=2", "strategy=ddp")) == 0
        asked = [line for line in server.asked() if line.endswith("train-00000.bin")]
    assert bits(tmp_path, "loaded") == bits(tmp_path, "alone") and bits(tmp_path, "ranks") == bits(tmp_path, "alone2")
    assert len(asked) == 2  # once for each cache


@pytest.mark.slow
def test_a_training_that_is_killed_while_a_shard_comes_goes_on_to_the_same_bits(kept: Path, tmp_path: Path) -> None:
    """And so does another one that waits for the shard meanwhile."""
    with served(kept, tmp_path / "slow") as server:
        (tmp_path / "slow").touch()
        calls = [run_of(tmp_path, name, "two", f"data.remote={server.url}") for name in ("killed", "other")]
        started: list[Any] = [subprocess.Popen([sys.executable, "-m", "lm", *call], stderr=subprocess.DEVNULL) for call in calls[:1]]
        ends = time.monotonic() + 120
        while not (half := list(tmp_path.glob("two/tokens/*/train-00000.bin.half"))) or half[0].stat().st_size < 20_000:
            assert time.monotonic() < ends and started[0].poll() is None
            time.sleep(0.005)
        started.append(subprocess.Popen([sys.executable, "-m", "lm", *calls[1]], stderr=subprocess.DEVNULL))
        os.kill(started[0].pid, signal.SIGKILL)
        assert started[0].wait() == -signal.SIGKILL and not list(tmp_path.glob("two/tokens/*/train-00000.bin"))
        assert main(calls[0]) == 0 and started[1].wait(timeout=120) == 0
    assert bits(tmp_path, "killed") == bits(tmp_path, "other") == bits(tmp_path, "alone")
