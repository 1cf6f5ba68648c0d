"""A run of several ranks as its user meets it: one rank fails or is killed, a signal comes, a config cannot be trained so."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from lm.cli.compose.compose import compose_config
from lm.errors import LmError
from lm.storage.atomic import verify
from lm.storage.checkpoint import checkpoints
from lm.training.callbacks.metrics import read
from lm.training.config import TrainConfig
from lm.training.launch.launcher import launch
from tests.conftest import started
from tests.training.conftest import ROOT, Configure, ranks, results

ENDLESS = ("trainer.max_steps=100000", "trainer.val_every=100000", "checkpoint.every=100000")
FAILING = """
import os, sys
from lm import errors
from lm.training.module import TrainModule
from lm.training.worker import main
STARTS = {starts!r}
own = TrainModule.training_step
def step(module, *args):
    if module.step == 5 and module.global_rank == 1:
        open(STARTS, 'a').write('.')
        {act}
    return own(module, *args)
TrainModule.training_step = step
code = main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)
"""
ONCE = "open(STARTS).read() == '.'"  # in what a failing worker does: the first time
Failing = Callable[[str], None]


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Failing:
    """The workers do something at step 6, on rank 1."""

    def arrange(act: str) -> None:
        (tmp_path / "failing_worker.py").write_text(FAILING.format(act=act, starts=str(tmp_path / "starts")))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
        monkeypatch.setattr("lm.training.launch.launcher.WORKER", "failing_worker")

    return arrange


def processes_of(run: Path) -> list[str]:
    """Command lines of living processes that train this run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            found.append(path.read_bytes())
    return [line.decode() for line in found if str(run).encode() in line]


def require_gone(run: Path, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while left := processes_of(run):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("act", "code", "said"),
    [
        ("raise ValueError('one of mine')", 1, r"^rank 1: internal error: ValueError: one of mine"),
        ("raise MemoryError('no more')", 5, r"^rank 1: train: out of memory with trainer.micro_batch=8"),
        ("os.kill(os.getpid(), 9)", 5, r"^rank 1: the process was killed by SIGKILL"),
        ("os.environ.update(LM_FAILPOINT='optimizer:enospc')", 5, r"^rank 1: \S+/step-00000008: no space left"),
    ],
    ids=["raises", "runs out of memory", "is killed", "finds no space"],
)
def test_the_end_of_one_rank_ends_all_and_is_told_with_the_rank(
    configure: Configure, failing: Failing, tmp_path: Path, act: str, code: int, said: str
) -> None:
    """The next start goes on from the last checkpoint."""
    cfg = configure("optim=adamw", *ranks("ddp"))
    failing(act)
    with pytest.raises(LmError, match=said) as caught:
        launch(cfg)
    assert caught.value.exit_code == code
    require_gone(tmp_path / "run")
    (kept,) = checkpoints(tmp_path / "run" / "checkpoints")
    verify(kept)
    assert kept.name == "step-00000004"
    read(tmp_path / "run" / "metrics.jsonl")


def test_a_rank_that_died_is_started_again_where_that_is_allowed(configure: Configure, failing: Failing, tmp_path: Path) -> None:
    launch(configure("optim=adamw", *ranks("ddp"), "run.name=whole"))
    failing(f"{ONCE} and os.kill(os.getpid(), 9)")
    launch(configure("optim=adamw", *ranks("ddp"), "launch.max_restarts=1"))
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    assert starts(tmp_path) == 2


@pytest.mark.parametrize(
    ("act", "n_starts"),
    [
        pytest.param("raise errors.ConfigError('one of mine')", 1, marks=pytest.mark.slow),
        pytest.param("raise errors.CheckpointError('one of mine')", 1, marks=pytest.mark.slow),
        ("raise errors.NumericsError('one of mine')", 1),
        pytest.param("raise errors.ResourceError('one of mine')", 2, marks=pytest.mark.slow),
    ],
    ids=["config", "checkpoint", "numbers", "disk or memory"],
)
def test_only_what_another_start_may_mend_is_started_again(
    configure: Configure, failing: Failing, tmp_path: Path, act: str, n_starts: int
) -> None:
    failing(act)
    with pytest.raises(LmError, match=r"^rank 1: one of mine"):
        launch(configure("optim=adamw", *ranks("ddp"), "launch.max_restarts=1"))
    assert starts(tmp_path) == n_starts


def starts(folder: Path) -> int:
    """How often rank 1 came to its failing step."""
    return len((folder / "starts").read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_all_ranks_behind_the_same_step_which_is_saved(
    tiny: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    """Seen to fail with the launcher keeping signals to itself."""
    args = [sys.executable, "-m", "lm", "train", *tiny, "optim=adamw", *ENDLESS, *ranks("ddp")]
    with started(args, cwd=ROOT) as process:
        wait_for_steps(tmp_path / "run", process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    newest = checkpoints(tmp_path / "run" / "checkpoints")[0]
    verify(newest)
    *_, resume, last = err.splitlines()
    step = int(newest.name.removeprefix("step-"))
    assert f"{number.name} ended the run after step {step}, which is saved" in last and resume.startswith("resume: lm train ")
    assert [line["step"] for line in read(tmp_path / "run" / "metrics.jsonl")] == list(range(1, step + 1))
    require_gone(tmp_path / "run", within_s=1)


def test_ranks_end_and_save_when_their_launcher_is_killed(tiny: list[str], tmp_path: Path) -> None:
    args = [sys.executable, "-m", "lm", "train", *tiny, "optim=adamw", *ENDLESS, *ranks("ddp")]
    with started(args, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        wait_for_steps(tmp_path / "run", process)
        process.kill()
    require_gone(tmp_path / "run")
    verify(checkpoints(tmp_path / "run" / "checkpoints")[0])


def test_a_config_that_differs_is_refused_before_any_rank_starts(configure: Configure, killed: Callable[..., None], tmp_path: Path) -> None:
    killed(configure("optim=adamw", *ranks("ddp")))
    kept = (tmp_path / "run" / "config.yaml").read_bytes()
    with pytest.raises(LmError, match=r"optim.lr: \S+ in the run, 0.5 now"):
        launch(configure("optim=adamw", "optim.lr=0.5", *ranks("ddp")))
    assert (tmp_path / "run" / "config.yaml").read_bytes() == kept


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["launch.devices=2"], "single is one process, and launch asks for 2"),
        (["strategy=ddp", "launch.devices=3"], "data.global_batch=8 is not a multiple of the 3 ranks"),
        (["strategy=zero2", "optim=muon"], "optim=muon works on whole matrices"),
        (["strategy=fsdp", "optim=muon"], "optim=muon works on whole matrices"),
        (["strategy=zero1", "optim=adamw", "trainer.ema_decay=0.9"], "trainer.ema_decay needs weights"),
        (["strategy=zero3", "optim=adamw", "trainer.precision=bf16-true"], "trainer.precision=bf16-mixed"),
        (["strategy=zero3", "optim=adamw", "trainer.compile=true"], "trainer.compile"),
        (["strategy=ddp", "launch.nodes=2"], "nodes=2 need a place to meet, and rendezvous is None"),
        (
            ["strategy=ddp", "launch.nodes=2", "launch.rendezvous=a:1", "launch.max_restarts=1"],
            "max_restarts=1 is for one machine, and nodes=2",
        ),
    ],
)
def test_what_cannot_be_trained_so_is_refused_by_the_config(configure: Configure, overrides: list[str], said: str) -> None:
    with pytest.raises(LmError, match=said):
        configure(*overrides)


def test_every_rank_prints_nothing_but_the_first(tiny: list[str]) -> None:
    args = [sys.executable, "-m", "lm", "train", *tiny, "optim=adamw", *ranks("fsdp")]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "left out" not in line] == []
    assert done.stdout.count("/run starts: ") == 1 and done.stdout.count("  validation") == 3


@pytest.mark.slow
def test_a_sweep_of_runs_of_two_ranks_runs_each_once(tiny: list[str], tmp_path: Path) -> None:
    args = [*(given for given in tiny if not given.startswith("run.name=")), "optim=adamw", *ranks("ddp"), "seed=0,1", "-m"]
    done = subprocess.run([sys.executable, "-m", "lm", "train", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folders = [path.parent for path in tmp_path.glob("*/config.yaml")]
    assert len(folders) == 2
    for folder in folders:
        assert json.loads((folder / "summary.json").read_text())["steps"] == 12
        assert [line["step"] for line in read(folder / "metrics.jsonl") if "loss" in line] == list(range(1, 13))


@pytest.mark.slow
def test_two_machines_train_one_run(tiny: list[str], tmp_path: Path) -> None:
    """Both commands on this machine, which find each other at the rendezvous."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    args = [
        sys.executable,
        "-m",
        "lm",
        "train",
        *tiny,
        "optim=adamw",
        "strategy=ddp",
        "launch.nodes=2",
        f"launch.rendezvous=localhost:{port}",
    ]
    machines = [subprocess.Popen(args, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [machine.communicate(timeout=120)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    launch(configure_like(tiny))
    assert results(tmp_path / "run") == results(tmp_path / "whole")


def configure_like(tiny: list[str]) -> TrainConfig:
    """The same run on one machine."""
    return compose_config(
        overrides=[*(given for given in tiny if not given.startswith("run.name=")), "run.name=whole", "optim=adamw", *ranks("ddp")]
    )


FAKE = """#!/bin/sh
echo "$@" >> {log}
"""


ASKED = ["requeue 77"]


@pytest.mark.parametrize(
    ("strategy", "node", "asked"),
    [([], "0", ASKED), (ranks("ddp"), "0", ASKED), ([], "1", [])],
    ids=["one rank", "two ranks", "another machine than the first"],
)
def test_sigusr1_saves_and_puts_the_job_back_into_the_queue_once(
    tiny: list[str], tmp_path: Path, strategy: list[str], node: str, asked: list[str]
) -> None:
    """Seen to fail with SIGUSR1 left to the system."""
    (tmp_path / "scontrol").write_text(FAKE.format(log=tmp_path / "asked"))
    (tmp_path / "scontrol").chmod(0o755)
    slurm = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "77", "SLURM_NODEID": node}
    args = [sys.executable, "-m", "lm", "train", *tiny, "optim=adamw", *ENDLESS, *strategy]
    with started(args, cwd=ROOT, env=os.environ | slurm) as process:
        wait_for_steps(tmp_path / "run", process)
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGUSR1, err
    assert "SIGUSR1 ended the run after step" in err.splitlines()[-1]
    assert ((tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []) == asked
    verify(checkpoints(tmp_path / "run" / "checkpoints")[0])


def wait_for_steps(run: Path, process: "subprocess.Popen[str]", steps: int = 3) -> None:
    metrics = run / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or len(metrics.read_bytes().splitlines()) < steps):
        time.sleep(0.05)


def test_a_port_in_use_is_no_matter(configure: Configure) -> None:
    """Those that torch uses where it is told nothing."""
    with socket.socket() as first, socket.socket() as second:
        for taken, port in ((first, 29400), (second, 29500)):
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", port))
            taken.listen()
        launch(configure("optim=adamw", "trainer.max_steps=4", *ranks("ddp")))
