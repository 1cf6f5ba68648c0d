"""Runs that something else than `lm train` starts: torchrun, and SLURM by tools/slurm/train.sbatch."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lm.storage.checkpoint import checkpoints
from lm.storage.manifest import verify
from lm.storage.run_folder import RunFolder
from tests.conftest import started
from tests.server import ROOT
from tests.training.conftest import Configure, Launch, ranks, read, results, settled
from tests.training.launch.test_launch import require_gone

SBATCH = ROOT / "tools" / "slurm" / "train.sbatch"
FAKES = {
    "lm": '#!/bin/sh\nexec {python} -m lm "$@"\n',
    "scontrol": '#!/bin/sh\nif [ "$1" = show ]; then printf "localhost\\nelsewhere\\n"; else echo "$@" >> {log}; fi\n',
    # A task on each of two machines, which get the job's signals.
    "srun": """#!/bin/bash
[ "$1" = --kill-on-bad-exit=0 ] || exit 9
shift
for node in 0 1; do SLURM_NODEID=$node "$@" & tasks="$tasks $!"; done
trap 'kill -USR1 $tasks' USR1
code=0
for task in $tasks; do
    until wait "$task"; now=$?; ! kill -0 "$task" 2> /dev/null; do :; done
    [ "$now" = 0 ] || code=$now
done
exit $code
""",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.slow
def test_plain_torchrun_of_a_frozen_config_is_the_run_that_lm_train_launches(configure: Configure, launch: Launch, tmp_path: Path) -> None:
    launch(configure("optim=adamw", *ranks("ddp"), "run.name=whole"))
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").write_config(configure("optim=adamw", *ranks("ddp")).tree())
    where = ["--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [sys.executable, "-m", "torch.distributed.run", *where, "-m", "lm.training.worker", str(tmp_path / "run" / "config.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert results(tmp_path / "run") == results(tmp_path / "whole")


@pytest.mark.slow  # two starts of two machines
def test_the_sbatch_file_saves_at_sigusr1_asks_for_the_queue_once_and_goes_on(tiny: list[str], tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in FAKES.items():
        (tools / name).write_text(text.replace("{python}", sys.executable).replace("{log}", str(tmp_path / "asked")))
        (tools / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_NUM_NODES": "2", "LM_PORT": str(free_port())}
    env = os.environ | slurm | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    endless = ["trainer.max_steps=100000", "trainer.val_every=100000", "checkpoint.every=100000", "optim=adamw", "strategy=ddp"]
    saved = [0]
    for start in (1, 2):
        with started(["bash", str(SBATCH), *settled(*tiny, *endless)], cwd=tmp_path, env=env) as job:
            wait_for_step(tmp_path / "run", saved[-1] + 3, job)
            job.send_signal(signal.SIGUSR1)
            _, err = job.communicate(timeout=120)
        assert job.returncode == 128 + signal.SIGUSR1, err
        newest = checkpoints(tmp_path / "run" / "checkpoints")[0]
        verify(newest)
        saved.append(int(newest.name.removeprefix("step-")))
        assert (tmp_path / "asked").read_text().splitlines() == ["requeue 77"] * start, err
    assert saved[2] >= saved[1] + 3
    assert [line["step"] for line in read(tmp_path / "run" / "metrics.jsonl")] == list(range(1, saved[2] + 1))
    require_gone(tmp_path)


def wait_for_step(run: Path, step: int, process: "subprocess.Popen[str]") -> None:
    while process.poll() is None and (
        not (run / "metrics.jsonl").exists() or not (done := read(run / "metrics.jsonl")) or done[-1]["step"] < step
    ):
        time.sleep(0.1)
