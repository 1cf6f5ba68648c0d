"""A process and the one it was started for: they end together, so that no orphan keeps holding a run folder, and the parent hands each
signal on, which the child may have got as well."""

import os
import signal
import threading
import time
from collections.abc import Mapping

_PARENT = "LM_PARENT"  # environment variable: id of the process that this one was started for
AT_ONCE = signal.SIGVTALRM  # what a parent hands on for a second signal: to end now, without a save. Nothing else sends it
_LOOK_S = 0.5
_IMPATIENT_S = 5.0  # within it a second signal means: at once
_ONCE_S = 1.0  # without a parent, the same signal counts once within it: a foreign launcher may pass on what each process got
_PATIENCE_S = 60.0  # to finish the step and save, then exit: a rank may hang waiting for one that is gone


def heard() -> list[int]:
    """Returns the signals on which a run saves and ends. SIGHUP, of a closed terminal, is not among them under nohup."""
    closed = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, AT_ONCE, *closed]


class Patience:
    """Tells a second signal, which ends a run at once, from one that came twice: a cluster sends its own to all processes of a job, and a
    parent hands on what it got, on a busy machine seconds later. So a child leaves it to its parent, which says AT_ONCE."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._at = 0.0

    def hear(self, number: int) -> int | None:
        """Returns what this signal asks for: itself, AT_ONCE, or None where it is one that has been heard already."""
        if number == AT_ONCE:
            return AT_ONCE
        since, last = time.monotonic() - self._at, self._last
        if last is not None:
            if number == signal.SIGHUP or (number == last and since < _ONCE_S):  # a closed terminal's comes from shell and system
                return None
            if since < _IMPATIENT_S:
                return None if _is_child else AT_ONCE
        self._last, self._at = number, time.monotonic()
        return number


def may_handle() -> bool:
    """Returns whether this is the main thread, the only one that Python lets handle signals; elsewhere they are left to the program."""
    return threading.current_thread() is threading.main_thread()


def named() -> Mapping[str, str]:
    """Returns the environment variables that make a child process end with this process."""
    return {_PARENT: str(os.getpid())}


def on_first_machine() -> bool:
    """Returns whether this is the first machine of a SLURM job, or of none."""
    return os.environ.get("SLURM_NODEID", "0") == "0"


_is_child = False  # of a process that hands signals on as Patience expects them


def end_with_parent() -> None:
    """Starts to watch the parent, in a process that was started for one. The parent may be gone already, and another program may stand
    between the two processes."""
    global _is_child
    named = os.environ.pop(_PARENT, None)
    _is_child = _is_child or named is not None
    if named is not None or "TORCHELASTIC_RUN_ID" in os.environ:
        next_to_us = os.getppid()
        threading.Thread(target=_watch, args=(next_to_us, int(named or next_to_us)), name="parent", daemon=True).start()


def _watch(next_to_us: int, parent: int) -> None:
    while os.getppid() == next_to_us and lives(parent):
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE_S)
    os._exit(128 + signal.SIGTERM)


def lives(process: int) -> bool:
    """Returns whether there is a process with this id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
