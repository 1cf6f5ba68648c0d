"""How one rank's end becomes known to the process that launched it: a small file each, in a folder that the environment names."""

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lm.errors import Interrupted, LmError, ResourceError
from lm.storage.atomic import replace_file
from lm.training.launch.parent import end_with_parent
from lm.training.launch.ranks import PeerLost

_AGAIN = "Train again to go on from the last checkpoint."
FOLDER, COMMAND = "LM_OUTCOMES", "LM_COMMAND"  # environment variables that the launching process sets
_STATES = {"T": "is stopped, as by SIGSTOP", "t": "is stopped by a debugger", "D": "waits for a disk or a device"}
_GONE = ("Z", "X", "?")  # letters of ps


class RankFailed(LmError):
    """What ended a run of several processes; the exit code is that of the rank's own error."""

    def __init__(self, found: "Outcome") -> None:
        super().__init__(f"rank {found.rank}: {found.message or 'no message'}", found.before)
        self.exit_code = found.exit_code or 1


@dataclass(frozen=True)
class Outcome:
    """Of one rank; `exit_code` None while it runs, and for ever where it was killed."""

    rank: int
    pid: int
    at: float  # seconds since 1970
    exit_code: int | None = None
    message: str = ""
    before: Sequence[str] = ()  # lines above the message
    peer_lost: bool = False
    stopped: bool = False  # by a signal

    def tell(self) -> bool:
        """To whoever launched this process, if someone did."""
        folder = os.environ.get(FOLDER)
        if folder:
            replace_file(Path(folder) / f"rank-{self.rank}.json", json.dumps(asdict(self)))
        return bool(folder)

    def state(self) -> str:
        """The letter of ps for what its process does, ? where the system does not say."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            return "?"


def begins(rank: int) -> None:
    """This rank lives; and should the launching process die, it shall end too, with its step finished and saved."""
    end_with_parent()
    Outcome(rank, os.getpid(), time.time()).tell()


def ends(rank: int, error: LmError | None) -> bool:
    """Returns whether there is someone to tell it to."""
    if error is None:
        return Outcome(rank, os.getpid(), time.time(), 0).tell()
    lost, stopped = isinstance(error, PeerLost), isinstance(error, Interrupted)
    return Outcome(rank, os.getpid(), time.time(), error.exit_code, error.sentence, error.before, lost, stopped).tell()


def read(folder: Path) -> list[Outcome]:
    """Of all ranks of this machine that have begun, as they stand."""
    return [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("rank-*.json"))]


def verdict(outcomes: list[Outcome], killed: dict[int, int], silent: dict[int, str]) -> LmError | None:
    """The error that ended a run: the first that is not the mere loss of another rank. killed: rank -> signal number. silent: rank -> what
    its process did when another one had waited for it in vain. Where one of these had gone, the others have only not noticed yet."""
    errors = sorted((found for found in outcomes if found.exit_code), key=lambda found: found.at)
    own = [found for found in errors if not found.peer_lost and not found.stopped]
    if own:
        return RankFailed(own[0])
    for rank, state in ({} if any(state in _GONE for state in silent.values()) else silent).items():
        if any(found.rank == rank and found.exit_code is None for found in outcomes):
            what = f"{_STATES.get(state, 'runs or sleeps')} (state {state})"
            return ResourceError(f"rank {rank}: it did not answer the others within launch.timeout_s, and its process {what}. {_AGAIN}")
    for rank in killed:
        if all(found.rank != rank or found.exit_code is None for found in outcomes):
            name = signal.Signals(killed[rank]).name
            hint = ", as the system does where memory runs out" if name == "SIGKILL" else ""
            return ResourceError(f"rank {rank}: the process was killed by {name}{hint}. {_AGAIN}")
    stopped = [found for found in errors if found.stopped]
    if stopped:
        return Interrupted(stopped[0].message, (stopped[0].exit_code or 0) - 128)
    return RankFailed(errors[0]) if errors else None


def may_pass(error: LmError) -> bool:
    """Whether another start may do better: after a death, a fault of the machine, or where memory or disk ran out. The same config,
    checkpoint and numbers would only fail again, and a signal was meant."""
    return error.exit_code in (LmError.exit_code, ResourceError.exit_code)
