"""The work of a cluster job: one run of a study in its own process, saved and requeued when the job's time is up.

Nothing heavy is imported: the job is a shell around `lm.training.worker`, which reads the frozen config.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.schema import Config
from lm.storage.atomic import replace_file
from lm.storage.reading import checked, read_json
from lm.training.launch.parent import may_handle, named

if TYPE_CHECKING:
    import submitit

_LOOK_S = 0.2
_PATIENCE_S = 60.0  # to wait for the submitting command's file, and for a run to save
_GRACE_S = 900.0  # to wait for the end of a job that was told to make room


class Submitted(Config):
    """What is kept of a run that a cluster was asked for.  job: the cluster's id.  code: exit code of the run; null until it has ended.
    cluster: which one; null where an older lm wrote the file."""

    job: str
    code: int | None = None
    cluster: str | None = None

    @classmethod
    def read(cls, file: Path) -> "Submitted | None":
        """Returns the content of the file; None where there is no file."""
        return checked(cls, read_json(file), file) if os.path.lexists(file) else None

    def write(self, file: Path) -> None:
        """Replaces the file atomically."""
        replace_file(file, self.model_dump_json())


_STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)


@contextmanager
def _told_to_make_room() -> Iterator[list[int]]:
    """Yields a list that gets an entry where SLURM tells the job to make room for another one: by SIGTERM, which its runs get too."""
    told: list[int] = []
    if os.environ.get("SUBMITIT_EXECUTOR") != "slurm" or not may_handle():
        yield told
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class Work:
    """Runs a command once, if the file still names this job: a job that was forgotten after a kill, or replaced, does nothing."""

    file: Path
    command: Sequence[str]
    log: Path
    threads: int
    child: "subprocess.Popen[bytes] | None" = None

    def __call__(self) -> None:
        """Called by submitit in the job, and again each time that the job was requeued."""
        import submitit

        job = submitit.JobEnvironment().job_id
        if not self._asked_for(job):
            return
        env = {**os.environ, **named(), "OMP_NUM_THREADS": str(self.threads)}
        with self.log.open("ab") as output, _told_to_make_room() as told:
            self.child = subprocess.Popen(
                self.command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            while self.child.poll() is None:
                time.sleep(_LOOK_S)  # not wait(): a signal handler calls checkpoint(), which would block on wait()'s lock
            if told and self.child.returncode in _STOPPED:
                time.sleep(_GRACE_S)  # a job that SLURM ends itself is queued again; one that ends before is over
        entry = Submitted.read(self.file)
        if entry is not None and entry.job == job and entry.code is None:  # else the run has another job by now
            entry.replace(code=self.child.returncode).write(self.file)

    def checkpoint(self) -> "submitit.helpers.DelayedSubmission":
        """Called by submitit before the cluster takes the machine away. The run saves, and the requeued job resumes it later."""
        import submitit

        if self.child is not None:
            self.child.send_signal(signal.SIGTERM)  # which counts once, should the cluster send one too
            patient_until = time.monotonic() + _PATIENCE_S
            while self.child.poll() is None and time.monotonic() < patient_until:
                time.sleep(_LOOK_S)
        again: Any = replace(self, child=None)
        return submitit.helpers.DelayedSubmission(again)

    def _asked_for(self, job: str) -> bool:
        for _ in range(int(_PATIENCE_S / _LOOK_S)):
            if (submitted := Submitted.read(self.file)) is not None and submitted.job == job:
                return submitted.code is None
            time.sleep(_LOOK_S)
        return False
