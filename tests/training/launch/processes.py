"""Processes that find each other, without the launcher of the house."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path


def launch(program: list[str], out: Path, timeout_s: int, world: int) -> None:
    """So many processes that meet at a free port; none outlives this call.  program: a file and its arguments.  out: for logs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "NODE_RANK": "0"}
    env = os.environ | shared | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[3])}
    jobs: list[subprocess.Popen[bytes]] = []
    try:
        for rank in map(str, range(world)):
            with (out / f"rank{rank}.log").open("w") as log:
                jobs.append(
                    subprocess.Popen([sys.executable, *program], env=env | {"RANK": rank, "LOCAL_RANK": rank}, stdout=log, stderr=log)
                )
        deadline = time.monotonic() + timeout_s
        while any(job.poll() is None for job in jobs) and not any(job.poll() for job in jobs) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        codes = [job.poll() for job in jobs]
        for job in jobs:
            job.kill()
            job.wait()
    said = "\n".join((out / f"rank{rank}.log").read_text()[-3000:] for rank in range(len(jobs)))
    assert codes == [0] * world, f"exit codes {codes} (None: was still running)\n{said}"
