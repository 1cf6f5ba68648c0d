"""The runs of a study, each in a process of its own, several side by side; whatever ends them, the same call goes on."""

import math
import signal
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

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
from lm.units import counted

WORKER = "lm.training.worker"


def run_missing(study: Runs, jobs: int) -> None:
    """Runs what has no result yet, tuning first.

    jobs: how many at once; the threads of each are the study's, so that their number changes no bit.
    Raises ConfigError where the folder was begun with something else, SweepError where a job failed otherwise than by diverging,
    Interrupted after a signal with the running jobs saved.
    """
    with RunLock(study.folder), ThreadPoolExecutor(jobs) as pool, Children() as children, quiet():
        study.freeze()
        while left := study.missing():
            note(f"{study.folder}: {counted(len(left), 'run')} to go")
            _round(study, left, pool, children)


def _round(study: Runs, left: list[Job], pool: ThreadPoolExecutor, children: Children) -> None:
    waiting: dict[Future[int], Job] = {pool.submit(_run, study, job, children): job for job in left}
    failed: list[tuple[Job, int]] = []
    done = 0
    while waiting:
        ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in ended:
            job, code, done = waiting.pop(future), future.result(), done + 1
            if code == NumericsError.exit_code:
                study.note_diverged(job)
            if children.caught is None:
                result = study.result(job)
                if result is None:
                    failed.append((job, code))
                told = f"failed({code})" if result is None else f"{result:.4f}" if math.isfinite(result) else "diverged"
                note(f"[{done}/{len(left)}] {job.name}: {told}")
    if children.caught is not None:
        said = f"{signal.Signals(children.caught).name} ended the study with its runs saved"
        raise Interrupted(f"{study.folder}: {said}. The same command goes on.", children.caught)
    if failed:
        job, code = failed[0]
        said = f"{len(failed)} of {len(left)} runs failed, {job.name} first: {_reason(study, job, code)}"
        raise SweepError(f"{study.folder}: {said}", code if 0 < code < 6 else 5)


def _reason(study: Runs, job: Job, code: int) -> str:
    if code < 0:
        return f"{signal.Signals(-code).name} ended it. The same command goes on."
    lines = study.file(job, "log").read_text(errors="backslashreplace").strip().splitlines()
    return lines[-1] if code and lines else "it ended without a model. Its log is beside it, in jobs/."


def _run(study: Runs, job: Job, children: Children) -> int:
    config, log = study.file(job, "yaml"), study.file(job, "log")
    replace_file(config, yaml_text(job.config.tree()))
    if job.trunk is not None:
        trunk, most = job.trunk
        branch_off(RunFolder(study.folder / trunk), most, RunFolder(study.folder / job.name))
    with disk_errors(log):
        output = log.open("ab")
    with output:
        return children.run([sys.executable, "-m", WORKER, str(config)], {"OMP_NUM_THREADS": str(study.threads)}, output)
