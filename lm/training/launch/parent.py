"""Ends a process together with the one it was started for, so that no orphan keeps holding a run folder."""

import os
import signal
import threading
import time
from collections.abc import Mapping

_PARENT = "LM_PARENT"  # environment variable: id of the process that this one was started for
ORPHANED = signal.SIGUSR2  # an orphan sends itself this: a run takes it as SIGTERM; before a run has begun it kills
_LOOK_S = 0.5
_PATIENCE_S = 60.0  # to finish the step and save, then exit: a rank may hang waiting for one that is gone


def heard() -> list[int]:
    """Returns the signals on which a run saves and ends. SIGHUP, of a closed terminal, is not among them under nohup."""
    closed = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *closed]


def may_handle() -> bool:
    """Returns whether this is the main thread, the only one that Python lets handle signals; elsewhere they are left to the program."""
    return threading.current_thread() is threading.main_thread()


def named() -> Mapping[str, str]:
    """Returns the environment variables that make a child process end with this process."""
    return {_PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Starts to watch the parent, in a process that was started for one. The parent may be gone already, and another program may stand
    between the two processes."""
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
