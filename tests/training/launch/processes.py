"""Processes that find each other, without the launcher of the house."""

import os
import signal
import socket
import time
from pathlib import Path

from tests.server import Process

_APART_S = 30.0  # at most, between the ends of the first and the last: others wait for one that failed


def launch(server: Path, program: list[str], out: Path, timeout_s: int, world: int) -> None:
    """So many processes that meet at a free port; none outlives this call.  program: a module and its arguments.  out: for logs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "NODE_RANK": "0"}
    env = os.environ | shared | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[3])}
    jobs: list[Process] = []
    try:
        for rank in map(str, range(world)):
            folder = out / f"rank{rank}"
            folder.mkdir()
            jobs.append(Process(server, folder, ["-m", *program], env | {"RANK": rank, "LOCAL_RANK": rank}))
        deadline = time.monotonic() + timeout_s
        while any(left := [job.alive() for job in jobs]) and time.monotonic() < deadline:
            if not all(left):
                deadline = min(deadline, time.monotonic() + _APART_S)
            time.sleep(0.1)
    finally:
        late = [job for job in jobs if job.alive()]
        for job in late:
            os.kill(job.pid, signal.SIGKILL)
    codes = [job.wait() for job in jobs]
    said = "\n".join(f"{job.stdout[-3000:]}{job.stderr[-3000:]}" for job in jobs)
    assert codes == [0] * world and not late, f"exit codes {codes}, {len(late)} killed after {timeout_s} s\n{said}"
