"""A process that was started for another one ends with it, so that nobody holds a run folder whose command is gone."""

import os
import signal
import threading
import time
from collections.abc import Mapping

_PARENT = "LM_PARENT"  # environment variable: the process that another one is started for
ORPHANED = signal.SIGUSR2  # what a process sends itself then; a run takes it as SIGTERM, and it ends what has not begun yet
_LOOK_S = 0.5
_PATIENCE_S = 60.0  # to finish the step and save; a rank may wait for one that is gone


def heard() -> list[int]:
    """Returns the signals after which a run is saved; that of a closed terminal is none where nohup has it ignored."""
    closed = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *closed]


def named() -> Mapping[str, str]:
    """Returns what the environment of a process needs to end with this one."""
    return {_PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Looks after it from now on, in a process that has one. It may be gone already, and a program may stand between the two."""
    named = os.environ.pop(_PARENT, None)
    if named is not None or "TORCHELASTIC_RUN_ID" in os.environ:
        next_to_us = os.getppid()
        threading.Thread(target=_watch, args=(next_to_us, int(named or next_to_us)), name="parent", daemon=True).start()


def _watch(next_to_us: int, parent: int) -> None:
    while os.getppid() == next_to_us and lives(parent):
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), ORPHANED)
    time.sleep(_PATIENCE_S)
    os._exit(128 + signal.SIGTERM)


def lives(process: int) -> bool:
    """Returns whether there is a process with this id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
