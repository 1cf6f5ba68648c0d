"""Runs each job of a sweep in its own process, one after the other; a failing job does not stop the rest."""

import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lm.cli.compose.compose import compose
from lm.cli.compose.naming import job_names, told_apart
from lm.errors import ConfigError, Interrupted, LmError, ResourceError, SweepError
from lm.printing import note, say
from lm.progress import quiet
from lm.storage.lock import in_use
from lm.storage.run_folder import RunFolder
from lm.training.launch.children import Children
from lm.units import table

_IN_USE = "in use"


@dataclass
class Job:
    """One combination of values in a sweep, and its outcome."""

    overrides: list[str]
    name: str  # the values in which it differs from the other jobs
    folder: Path | None = None
    status: str = "not run"
    exit_code: int = 0
    refused: str | None = None  # error that keeps it from running at all
    train_s: float = 0.0

    @property
    def in_use(self) -> bool:
        """Whether another process was at the job when its turn came, as one of the same sweep on another machine."""
        return self.status == _IN_USE

    @property
    def complete(self) -> bool:
        """Whether the job's run is complete, by this sweep or an earlier one."""
        return self.status in ("ok", "skipped")

    def told(self, metric: str) -> str:
        """Returns a figure of the job's run, as text."""
        try:
            value = RunFolder(self.folder).summary().get(metric) if self.folder is not None else None
        except LmError:
            return "-"
        return f"{value:.4f}" if isinstance(value, int | float) else "-"


def multirun(jobs: Sequence[Sequence[str]]) -> None:
    """Runs all missing jobs and prints a table. Raises SweepError with the first failed job's exit code, Interrupted after a signal."""
    names, placed = job_names(jobs), told_apart(jobs)
    planned = [_plan(name, overrides) for name, overrides in zip(names, placed, strict=True)]
    _refuse_shared_folders(planned)
    with Children() as children:
        for number, job in enumerate(planned, start=1):
            if children.caught is None and job.status == "not run":
                say(f"[{number}/{len(planned)}] {job.name}")
                with quiet():
                    _run(job, children)
    of_text = any(job.told("val_bits_per_byte") != "-" for job in planned) or all(job.told("val_loss") == "-" for job in planned)
    metric = "val_bits_per_byte" if of_text else "val_loss"
    rows = [(job.name, job.status, job.told(metric), f"{job.train_s:.0f}") for job in planned]
    for line in table([("job", "status", metric, "seconds"), *rows], indent="").split("\n"):
        say(line)
    if len(done := [str(job.folder) for job in planned if job.complete]) > 1:
        say(f"compare them: lm compare {shlex.join(done)}")
    _judge(planned, children.caught)


def _plan(name: str, overrides: list[str]) -> Job:
    try:
        composition = compose(overrides)
        composition.keep_past()
        config = composition.full()
        folder = RunFolder.of(config["run"])
        has_ended = folder.ended(config) is not None
        if not has_ended:
            composition.config()
    except ConfigError as error:
        note(error.sentence)
        return Job(overrides, name, None, f"failed({error.exit_code})", error.exit_code, error.sentence)
    return Job(overrides, name or folder.path.name, folder.path, "skipped" if has_ended else "not run")


def _refuse_shared_folders(jobs: Sequence[Job]) -> None:
    seen: dict[Path, Job] = {}
    for job in jobs:
        if job.folder is None:
            continue
        if job.folder in seen:
            raise ConfigError(f"{job.name}: two jobs of the sweep are this one, in {job.folder}. Give each value once.")
        seen[job.folder] = job


def _run(job: Job, children: Children) -> None:
    if _at_work_elsewhere(job):
        return
    started = time.monotonic()
    code = children.run([sys.executable, "-m", "lm", "train", *job.overrides])
    if code == ResourceError.exit_code and _at_work_elsewhere(job):  # both began at once
        return
    job.train_s = time.monotonic() - started
    job.exit_code = 128 - code if code < 0 else code
    job.status = "ok" if code == 0 else _why(code, children.caught)


def _at_work_elsewhere(job: Job) -> bool:
    if job.folder is not None and in_use(job.folder):
        job.status, job.exit_code = _IN_USE, ResourceError.exit_code
    return job.in_use


def _why(code: int, caught: int | None) -> str:
    """Returns a job's status by its exit code; a signal that ends the sweep has also ended the job."""
    if caught is not None:
        return f"stopped({signal.Signals(caught).name})"
    return f"failed({code})" if code > 0 else f"killed({signal.Signals(-code).name})"


def _judge(jobs: Sequence[Job], caught: int | None) -> None:
    if caught is not None:
        done = f"{signal.Signals(caught).name} with {sum(job.complete for job in jobs)} of {len(jobs)} jobs complete"
        raise Interrupted(f"sweep: {done}. The same command runs what is missing.", caught)
    if codes := [job.exit_code for job in jobs if job.exit_code and not job.in_use]:
        refused = next((f" ({job.name}: {job.refused})" for job in jobs if job.refused is not None), "")
        remedy = "Mend the cause; the same command runs only what is missing."
        raise SweepError(f"sweep: {len(codes)} of {len(jobs)} jobs failed{refused}. {remedy}", codes[0])
    if codes := [job.exit_code for job in jobs if job.in_use]:
        said = f"sweep: {len(codes)} of {len(jobs)} jobs were in use by other processes"
        raise SweepError(f"{said}. When these have ended, the same command runs what is missing.", codes[0])
