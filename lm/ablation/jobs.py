"""The runs of a study, each in a process of its own, several side by side; whatever ends them, the same call goes on."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from lm.ablation.study import Job, Runs
from lm.errors import Interrupted, NumericsError, SweepError
from lm.printing import note
from lm.progress import quiet
from lm.storage.atomic import replace_file
from lm.storage.lock import RunLock
from lm.storage.reading import yaml_text
from lm.training.launch import parent
from lm.units import counted

WORKER = "lm.training.worker"


def run_missing(study: Runs, jobs: int) -> None:
    """Runs what has no result yet, tuning first.

    jobs: how many at once; the threads of each are the study's, so that their number changes no bit.
    Raises SweepError where a job failed otherwise than by diverging, Interrupted after a signal with the running jobs saved.
    """
    with RunLock(study.folder), _forwarded() as running, ThreadPoolExecutor(jobs) as pool, quiet():
        while left := study.missing():
            note(f"{study.folder}: {counted(len(left), 'run')} to go")
            _round(study, left, pool, running)


class _Running:
    """The processes of now, so that a signal reaches each of them once."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self._children: set[subprocess.Popen[bytes]] = set()
        self._guard = threading.RLock()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.caught = number
        for child in list(self._children):
            child.send_signal(number)

    def call(self, command: list[str], env: dict[str, str], log: Path) -> int:
        """The exit code of a process whose output goes to a file; minus a signal's number where one ended it."""
        with log.open("ab") as file:
            with self._guard:
                if self.caught is not None:
                    return -self.caught
                child = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
                self._children.add(child)
            code = child.wait()
        self._children.discard(child)
        return code


def _round(study: Runs, left: list[Job], pool: ThreadPoolExecutor, running: _Running) -> None:
    waiting: dict[Future[int], Job] = {pool.submit(_run, study, job, running): job for job in left}
    failed: list[tuple[Job, int]] = []
    done = 0
    while waiting:
        ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in ended:
            job, code, done = waiting.pop(future), future.result(), done + 1
            if code == NumericsError.exit_code:
                study.note_diverged(job)
            elif code and running.caught is None:
                failed.append((job, code))
            if running.caught is None:
                result = study.result(job)
                told = "diverged" if code == NumericsError.exit_code else f"failed({code})" if result is None else f"{result:.4f}"
                note(f"[{done}/{len(left)}] {job.name}: {told}")
    if running.caught is not None:
        said = f"{signal.Signals(running.caught).name} ended the study with its runs saved"
        raise Interrupted(f"{study.folder}: {said}. The same command goes on.", running.caught)
    if failed:
        job, code = failed[0]
        last = (_log(study, job).read_text(errors="backslashreplace").strip().splitlines() or ["nothing was said"])[-1]
        raise SweepError(f"{study.folder}: {len(failed)} of {len(left)} runs failed, {job.name} first: {last}", code if 0 < code < 6 else 5)


def _run(study: Runs, job: Job, running: _Running) -> int:
    config = study.folder / "jobs" / f"{job.name}.yaml"
    config.parent.mkdir(exist_ok=True)
    replace_file(config, yaml_text(job.config.tree()))
    env = {**os.environ, **parent.named(), "OMP_NUM_THREADS": str(study.threads)}
    return running.call([sys.executable, "-m", WORKER, str(config)], env, _log(study, job))


def _log(study: Runs, job: Job) -> Path:
    return study.folder / "jobs" / f"{job.name}.log"


@contextmanager
def _forwarded() -> Iterator[_Running]:
    running = _Running()
    before = {number: signal.signal(number, running) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield running
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
