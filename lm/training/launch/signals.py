"""Ctrl-C, SIGTERM, SIGHUP (a closed terminal), SIGUSR1 and SIGUSR2 finish the step, save and exit with 130, 143, 129, 138 or 140, by the
first that came. A second signal within five seconds exits at once, or in a session raises at once, and says what is lost.

SIGUSR1 is what a cluster sends some time before it takes the machine away: a job of SLURM is then put back into its queue.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import local
from types import FrameType, TracebackType
from typing import Any, Self

from lm.errors import Interrupted
from lm.printing import note
from lm.storage.checkpoint import checkpoints
from lm.storage.run_folder import RunFolder
from lm.training.launch import outcome
from lm.training.launch.parent import AT_ONCE, Patience, heard, may_handle, on_first_machine


class Signals:
    """Inside the block a signal raises Interrupted; after `defer()` it is only recorded in `received`."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self.received: int | None = None
        self.step = 0  # the last finished step
        self._folder, self._rank = folder, rank
        self._deferred = self._held = False
        self._patience = Patience()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.getsignal(number) for number in heard()}
        self._install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if may_handle():
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def defer(self) -> None:
        """From now on signals are only recorded, and the loop checks `received` after each step. Installs the handlers again, since
        Lightning sets its own."""
        self._deferred = True
        self._install()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps signals back to the end of the block. An import that one breaks off cannot be made again in the same process."""
        self._held = True
        yield
        self._held = False
        if self.received is not None:
            self._refuse(self.received)

    @contextmanager
    def reaching_compiler(self) -> Iterator[None]:
        """Raises Interrupted for an error of torch.compile within the block after a signal: one to all processes of a job, as a cluster
        sends it, ends those of the compiler too, and with them the step under way."""
        try:
            yield
        except Exception as error:
            compiler = sys.modules.get("torch._inductor.exc")
            if self.received is None or compiler is None or not isinstance(error, compiler.InductorError):
                raise
            name = signal.Signals(self.received).name
            raise self._unsaved(f"{name} also ended the compiler, which step {self.step + 1:,} needed", self.received) from error

    def _unsaved(self, what: str, number: int) -> Interrupted:
        kept = checkpoints(self._folder.checkpoints)
        left = (
            f"{kept[0]} is the last checkpoint, and training again goes on from there" if kept else "There is no checkpoint to go on from"
        )
        return Interrupted(f"{self._folder.path}: {what}. {left}.", number)

    def _install(self) -> None:
        if may_handle():
            for number in self._previous:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        asked = self._patience.hear(number)
        if asked is None:
            return
        if number == AT_ONCE:
            number = self.received or signal.SIGTERM
        if asked == AT_ONCE and not self._held:
            self._leave(number)
        self.received = self.received or number
        name = signal.Signals(number).name
        if self._deferred:
            if self._rank == 0:
                with suppress(RuntimeError):  # it came in the middle of another line
                    note(f"{name}: finishing the step under way, which is then saved; again within 5 s ends at once, without a save")
        elif not self._held:
            self._refuse(number)

    def _refuse(self, number: int) -> None:
        name = signal.Signals(number).name
        raise Interrupted(f"train: {name} came before the first step, so there is nothing new to save. Train again to start.", number)

    def _leave(self, number: int) -> None:
        """Exits at once without a save, even where something hangs; in a session such as a notebook, whose variables are kept, raises."""
        name = signal.Signals(number).name
        error = self._unsaved(f"{name} came as a second signal, so the run ended at once after step {self.step:,}, without a save", number)
        if hasattr(sys, "ps1"):  # as Python and IPython tell of a session
            raise error
        if not outcome.ends(self._rank, error):
            note(error.sentence)
        os._exit(error.exit_code)


_masks = local()  # of the thread that forks: the signals that it kept back before


def _ours() -> list[int]:
    return [number for number in heard() if getattr(signal.getsignal(number), "__func__", None) is Signals._handle]


def _before_a_fork() -> None:
    """Keeps signals back until a fork has its own: one that came at once, as from Process.terminate behind start, was noted there."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ours) if (ours := _ours()) else None


def _behind_a_fork() -> None:
    if (before := getattr(_masks, "before", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _of_a_fork() -> None:
    """Gives a fork of a training process, as multiprocessing makes for a reward, the signals of a process of its own: whoever ends it, as
    Process.terminate and Pool do by SIGTERM, ends it. Else what is meant for the whole job passes it by: the run needs it for its step."""
    for number in _ours():
        signal.signal(number, signal.SIG_DFL if number in (signal.SIGTERM, AT_ONCE) else signal.SIG_IGN)
    _behind_a_fork()


os.register_at_fork(before=_before_a_fork, after_in_parent=_behind_a_fork, after_in_child=_of_a_fork)


def requeue(stopped: Interrupted) -> None:
    """After SIGUSR1, requeues the SLURM job, on its first machine; the run then resumes in the same run folder."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or stopped.exit_code != 128 + signal.SIGUSR1 or not on_first_machine():
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        note(f"scontrol: job {job} is not put back into the queue ({error}). Submit it again; the run goes on.")
