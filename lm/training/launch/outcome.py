"""How the launching process learns how each rank ended: by one small file per rank, in a folder that the environment names."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lm.errors import Interrupted, LmError, ResourceError
from lm.storage.atomic import replace_file
from lm.training.launch.parent import end_with_parent, lives
from lm.training.launch.ranks import PeerLost

AGAIN = "Train again to go on from the last checkpoint."
FOLDER, COMMAND = "LM_OUTCOMES", "LM_COMMAND"  # environment variables that the launching process sets
_STATES = {"T": "is stopped, as by SIGSTOP", "t": "is stopped by a debugger", **dict.fromkeys("DU", "waits for a disk or a device")}
_GONE = ("Z", "X", "?")  # letters of ps


class RankFailed(LmError):
    """The error of the rank that ended a run of several processes, with that error's exit code."""

    def __init__(self, found: "Outcome") -> None:
        super().__init__(f"rank {found.rank}: {found.message or 'no message'}", found.before)
        self.exit_code = found.exit_code or 1


@dataclass(frozen=True)
class Outcome:
    """State of one rank. `exit_code` is None while the rank runs, and stays None where it was killed."""

    rank: int
    pid: int
    at: float  # seconds since 1970
    exit_code: int | None = None
    message: str = ""
    before: Sequence[str] = ()  # lines above the message
    peer_lost: bool = False
    stopped: bool = False  # by a signal

    def tell(self) -> bool:
        """Writes the outcome for the launching process; returns whether there is one."""
        folder = os.environ.get(FOLDER)
        if folder:
            replace_file(Path(folder) / f"rank-{self.rank}.json", json.dumps(asdict(self)))
        return bool(folder)

    def gone(self) -> bool:
        """Whether the process has ended without an outcome, as one that is killed."""
        return self.exit_code is None and self.state() in _GONE

    def state(self) -> str:
        """Returns the rank's process state as a letter of ps; ? where the process is no more."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            return _by_ps(self.pid) if lives(self.pid) else "?"


def _by_ps(pid: int) -> str:
    """As `state`, on a system without /proc such as macOS. A killed process that nobody has waited for is one that `lives`."""
    try:
        return subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()[:1] or "?"
    except OSError:
        return "S"


def begins(rank: int) -> None:
    """Records that this rank runs. From now on it also ends, with its step finished and saved, if the launching process dies."""
    end_with_parent()
    Outcome(rank, os.getpid(), time.time()).tell()


def ends(rank: int, error: LmError | None) -> bool:
    """Records how this rank ended; returns whether a launching process reads it."""
    if error is None:
        return Outcome(rank, os.getpid(), time.time(), 0).tell()
    lost, stopped = isinstance(error, PeerLost), isinstance(error, Interrupted)
    return Outcome(rank, os.getpid(), time.time(), error.exit_code, error.sentence, error.before, lost, stopped).tell()


def read(folder: Path) -> list[Outcome]:
    """Returns the current outcomes of all ranks of this machine that have begun."""
    return [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("rank-*.json"))]


def complete(outcomes: list[Outcome]) -> bool:
    """Whether the ranks of this machine have ended, all of them well."""
    return bool(outcomes) and all(found.exit_code == 0 for found in outcomes)


def verdict(outcomes: list[Outcome], killed: dict[int, int], silent: dict[int, str]) -> LmError | None:
    """Returns the error that ended a run: the first that is not merely the loss of another rank. killed: rank -> signal number. silent:
    rank -> state of its process when another rank had waited for it in vain. If one of these processes was gone, the other silent ranks
    are not at fault: they had only not noticed yet."""
    errors = sorted((found for found in outcomes if found.exit_code), key=lambda found: found.at)
    own = [found for found in errors if not found.peer_lost and not found.stopped]
    if own:
        return RankFailed(own[0])
    for rank, state in ({} if any(state in _GONE for state in silent.values()) else silent).items():
        if any(found.rank == rank and found.exit_code is None for found in outcomes):
            what = f"{_STATES.get(state, 'runs or sleeps')} (state {state})"
            return ResourceError(f"rank {rank}: it did not answer the others within launch.timeout_s, and its process {what}. {AGAIN}")
    for rank in killed:
        if all(found.rank != rank or found.exit_code is None for found in outcomes):
            name = signal.Signals(killed[rank]).name
            hint = ", as the system does where memory runs out" if name == "SIGKILL" else ""
            return ResourceError(f"rank {rank}: the process was killed by {name}{hint}. {AGAIN}")
    stopped = [found for found in errors if found.stopped]
    if stopped:
        return Interrupted(stopped[0].message, (stopped[0].exit_code or 0) - 128)
    return RankFailed(errors[0]) if errors else None


def may_pass(error: LmError) -> bool:
    """Whether a restart may succeed: after a killed rank, a fault of the machine, or where memory or disk ran out. Errors of config,
    checkpoint or numerics would only recur, and a signal is meant to end the run."""
    return error.exit_code in (LmError.exit_code, ResourceError.exit_code)
