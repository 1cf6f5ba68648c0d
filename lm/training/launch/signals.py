"""Ctrl-C, SIGTERM and SIGUSR1: finish the step, save, exit 130, 143 or 138. A second one within five seconds exits at once.

SIGUSR1 is what a cluster sends some time before it takes the machine away: a job of SLURM is then put back into its queue.
"""

import os
import signal
import subprocess
import sys
import time
from types import FrameType, TracebackType
from typing import Any, Self

from lm.errors import Interrupted

ORPHANED = signal.SIGUSR2  # the system sends it to a rank whose launcher has died, once for each thread of the launcher
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, ORPHANED)
_IMPATIENT_S = 5.0


class Signals:
    """Inside the block a signal raises Interrupted, and after `defer()` it is only noted in `received`."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferred = False
        self._at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.getsignal(number) for number in _SIGNALS}
        self._install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """From now on the loop looks at `received` after each step. Installs the handlers again, since Lightning sets its own."""
        self._deferred = True
        self._install()

    def _install(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == ORPHANED:  # as SIGTERM, but however often it comes, no one is impatient
            if self.received is not None:
                return
            number = signal.SIGTERM
        if self.received is not None and time.monotonic() - self._at < _IMPATIENT_S:
            os._exit(128 + number)
        self.received, self._at = number, time.monotonic()
        if not self._deferred:
            name = signal.Signals(number).name
            raise Interrupted(f"train: {name} came before the first step, so there is nothing new to save. Train again to start.", number)


def requeue(stopped: Interrupted) -> None:
    """After SIGUSR1 the first machine of a SLURM job asks for it to be run again; it goes on in the same run folder."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or stopped.exit_code != 128 + signal.SIGUSR1 or os.environ.get("SLURM_NODEID", "0") != "0":
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"scontrol: job {job} is not put back into the queue ({error}). Submit it again; the run goes on.", file=sys.stderr)
