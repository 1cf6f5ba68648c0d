"""Runs a study as jobs of a cluster, by submitit: jobs are submitted once, and later commands find them again."""

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lm.ablation.running.jobs import LOST, Place, command, interrupt, log_of
from lm.ablation.running.work import Submitted, Work
from lm.ablation.runs import Job, Runs
from lm.errors import ConfigError, NumericsError, ResourceError
from lm.printing import note
from lm.storage.run_folder import RunFolder
from lm.training.launch.children import Children
from lm.training.launch.parent import lives
from lm.units import counted

Kind = Literal["slurm", "local"]
_LOOK_S = 0.5
_REQUEUED = 1000  # times that a job may time out and be requeued


@dataclass(frozen=True)
class Cluster(Place):
    """Runs as cluster jobs, which go on without the command that submitted them.

    jobs: how many run at once.  minutes: time of a job, which then saves its run and is requeued.  options: of sbatch, by name.
    Raises ConfigError where submitit is not installed.
    """

    kind: Kind
    jobs: int
    minutes: int
    gpus: int
    options: Mapping[str, str]

    def __post_init__(self) -> None:
        _submitit()

    def run(self, study: Runs, left: Sequence[Job]) -> Generator[tuple[Job, int], None, None]:
        """Runs the jobs that are left. After a signal to this command they go on in the cluster."""
        folder = study.folder.absolute() / "jobs" / "cluster"
        waiting = {job.name: (job, found) for job in left if (found := self._found(folder, study, job)) is not None}
        diverged = {job.name: job for job in left if job.name not in waiting and _has_diverged(study, job)}
        queue = [job for job in left if job.name not in waiting and job.name not in diverged]
        yield from ((job, NumericsError.exit_code) for job in diverged.values())
        if waiting:
            note(f"{study.folder}: {counted(len(waiting), 'run')} of an earlier command in the cluster")
        with Children() as signals:
            while queue or waiting:
                room = len(queue) if self.kind == "slurm" else max(0, self.jobs - len(waiting))
                for job, submitted in self._submitted(folder, study, queue[:room]):
                    waiting[job.name] = job, submitted
                queue = queue[room:]
                if signals.caught is not None:
                    interrupt(study, signals.caught, "ended the wait; the jobs go on in the cluster. The same command finds them")
                time.sleep(_LOOK_S)
                for job, submitted in list(waiting.values()):
                    if (code := _ended(study, job, submitted)) is not None:
                        del waiting[job.name]
                        yield job, code

    def _found(self, folder: Path, study: Runs, job: Job) -> Any | None:
        """Returns the job handle that an earlier command's submission left; None where no such job is waiting or running."""
        entry = Submitted.read(_file(study, job))
        if entry is None or entry.code is not None or entry.cluster not in (None, self.kind):
            return None
        found = _Local(int(entry.job)) if self.kind == "local" else _submitit().SlurmJob(folder=folder, job_id=entry.job)
        return None if found.done() else found

    def _submitted(self, folder: Path, study: Runs, jobs: Sequence[Job]) -> list[tuple[Job, Any]]:
        """Submits the jobs as one array. A job trains only if its file names it, so that a kill in here cannot make two jobs of one run."""
        if not jobs:
            return []
        submitit = _submitit()
        works = [
            Work(_file(study, job).absolute(), command(study, _anywhere(job)), log_of(study, job).absolute(), study.threads) for job in jobs
        ]
        try:
            executor = submitit.AutoExecutor(folder=folder, cluster=self.kind, slurm_max_num_timeout=_REQUEUED)
            executor.update_parameters(
                name=f"lm-{study.folder.name}",
                timeout_min=self.minutes,
                cpus_per_task=study.threads,
                gpus_per_node=self.gpus,
                slurm_array_parallelism=self.jobs,
                slurm_additional_parameters=dict(self.options),
            )
            found = executor.submit_array(works)
        except (RuntimeError, OSError) as error:
            said = " ".join(str(error).split())[:300]
            raise ResourceError(
                f"cluster={self.kind}: the runs cannot be submitted ({said}). Mend it; the same command goes on."
            ) from error
        for job, submitted in zip(jobs, found, strict=True):
            Submitted(job=submitted.job_id, cluster=self.kind).write(_file(study, job))
        return list(zip(jobs, found, strict=True))


@dataclass(frozen=True)
class _Local:
    """A job that another command started on this machine.  process: the id of its process, which is the job's id."""

    process: int

    def done(self) -> bool:
        """Returns whether it has ended, and its id is nobody's, or, where the system tells, another program's by now."""
        try:
            command = Path(f"/proc/{self.process}/cmdline").read_bytes()  # empty while it begins
        except OSError:
            command = b""
        return b"submitit" not in command if command else not lives(self.process)


def _anywhere(job: Job) -> Job:
    """Returns the job with an absolute run folder, so that later commands find it from any current folder."""
    place = RunFolder.of(job.config.tree()["run"]).path.absolute()
    return replace(job, config=job.config.replace(run={"name": job.name, "dir": str(place.parent)}))


def _has_diverged(study: Runs, job: Job) -> bool:
    """Whether the job diverged while no command waited for it: it would diverge again."""
    entry = Submitted.read(_file(study, job))
    return entry is not None and entry.code == NumericsError.exit_code


def _file(study: Runs, job: Job) -> Path:
    return study.file(job, "submitted.json")


def _ended(study: Runs, job: Job, submitted: Any) -> int | None:
    """Returns a job's exit code; None where it waits or runs."""
    gone = submitted.done()  # asked before the file is read: a job writes its file before it is done
    entry = Submitted.read(_file(study, job))
    if entry is not None and entry.code is not None:
        return entry.code
    return LOST if gone else None


def options_of(partition: str | None, sbatch: Sequence[str]) -> dict[str, str]:
    """Returns options of sbatch by name. Raises ConfigError for an option that is not of the form name=value."""
    for option in sbatch:
        if not option.partition("=")[2]:
            raise ConfigError(f"sbatch={option}: this is not of the form name=value. Write one such as sbatch=account=abc.")
    named = dict(option.removeprefix("--").split("=", 1) for option in sbatch)
    return named | ({"partition": partition} if partition is not None else {})


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ConfigError("cluster: jobs are submitted by the package submitit. Run: pip install 'slotlm[cluster]'") from None
    return submitit
