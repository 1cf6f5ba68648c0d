"""Runs a study, each run in its own process, several at once; after any interruption the same call continues."""

import math
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lm.ablation.exchange import branch_off
from lm.ablation.runs import Job, Runs
from lm.errors import Interrupted, NumericsError, SweepError
from lm.printing import note
from lm.progress import quiet
from lm.storage.atomic import disk_errors, replace_file
from lm.storage.lock import RunLock
from lm.storage.reading import yaml_text
from lm.storage.run_folder import RunFolder
from lm.training.launch.children import Children
from lm.training.launch.parent import AT_ONCE
from lm.units import counted, duration

WORKER = "lm.training.worker"
LOST = 127  # exit code for a job that has ended in the cluster without recording its own


class Place(ABC):
    """Where the runs of a study are executed."""

    @abstractmethod
    def run(self, study: Runs, left: Sequence[Job]) -> Generator[tuple[Job, int], None, None]:
        """Yields each job with the exit code of its process as it ends; minus a signal's number where one ended it.

        Raises Interrupted after a signal.
        """


@dataclass(frozen=True)
class Here(Place):
    """Runs as processes of this machine, which end with this process.  jobs: how many run at once."""

    jobs: int

    def run(self, study: Runs, left: Sequence[Job]) -> Generator[tuple[Job, int], None, None]:
        """Runs the jobs that are left; after a signal the running ones save."""
        with ThreadPoolExecutor(self.jobs) as pool, Children() as children:
            started: dict[Future[int], Job] = {pool.submit(_run, study, job, children): job for job in left}
            for future in as_completed(started):
                if children.caught is None or future.result() == NumericsError.exit_code:
                    yield started[future], future.result()
            if children.caught is not None:
                saved = "at once, without a save of the runs under way" if AT_ONCE in children.numbers else "with its runs saved"
                interrupt(study, children.caught, f"ended the study {saved}. The same command goes on")


def interrupt(study: Runs, number: int, said: str) -> NoReturn:
    """Raises Interrupted for a signal.  said: what the signal did."""
    raise Interrupted(f"{study.folder}: {signal.Signals(number).name} {said}.", number)


def command(study: Runs, job: Job) -> list[str]:
    """Returns the command that runs a job. Before, writes the job's config to a file, and copies the checkpoint from which it starts."""
    config = study.file(job, "yaml")
    replace_file(config, yaml_text(job.config.tree()))
    if job.trunk is not None:
        trunk, most = job.trunk
        branch_off(RunFolder(study.folder / trunk), most, study.run_of(job))
    return [sys.executable, "-m", WORKER, str(config.absolute())]


def log_of(study: Runs, job: Job) -> Path:
    """Returns the file for a job's output, after checking that it can be written."""
    log = study.file(job, "log")
    with disk_errors(log):
        log.open("ab").close()
    return log


def run_missing(study: Runs, place: Place) -> None:
    """Runs all jobs that have no result yet, tuning first.

    The study fixes the number of threads per run, so that results are the same bit for bit.
    Raises ConfigError where the folder was begun with another config, SweepError where a job failed other than by diverging, Interrupted
    after a signal.
    """
    with RunLock(study.folder), quiet():
        study.freeze()
        if not study.missing():
            note(f"{study.folder}: all runs are there")
        while left := study.missing():
            note(f"{study.folder}: {counted(len(left), 'run')} to go")
            _round(study, left, place)


def _round(study: Runs, left: list[Job], place: Place) -> None:
    failed: list[tuple[Job, int]] = []
    started = time.monotonic()
    with closing(place.run(study, left)) as ending:
        for done, (job, code) in enumerate(ending, 1):
            if code == NumericsError.exit_code:
                study.note_diverged(job)
            result = study.result(job)
            if result is None:
                failed.append((job, code))
                if 0 < code < 128:  # else a signal ended it
                    study.note_failed(job, _reason(study, job, code))
            told = f"failed({code})" if result is None else f"{result:.4f}" if math.isfinite(result) else "diverged"
            ahead = (len(left) - done) * (time.monotonic() - started) / done
            note(f"[{done}/{len(left)}] {job.name}: {told}" + (f", about {duration(ahead)} to go" if done < len(left) else ""))
    if failed:
        job, code = failed[0]
        said = f"{len(failed)} of {len(left)} runs failed, {job.name} first: {_reason(study, job, code)}"
        raise SweepError(f"{study.folder}: {said}", code if 0 < code < 6 else 5)


def _reason(study: Runs, job: Job, code: int) -> str:
    if code < 0:
        return f"{signal.Signals(-code).name} ended it. The same command goes on."
    if code == LOST:
        return "its job ended in the cluster before the run did; why, SLURM's sacct and jobs/cluster may tell. The same command goes on."
    lines = study.file(job, "log").read_text(errors="backslashreplace").strip().splitlines()
    return lines[-1] if code and lines else "it ended without a model. Its log is beside it, in jobs/."


def _run(study: Runs, job: Job, children: Children) -> int:
    call = command(study, job)
    with log_of(study, job).open("ab") as output:
        return children.run(call, {"OMP_NUM_THREADS": str(study.threads)}, output)
