"""How one rank's end becomes known to the process that launched it: a small file each, in a folder that the environment names."""

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lm.errors import Interrupted, LmError, ResourceError
from lm.storage.atomic import replace_file
from lm.training.launch.ranks import PeerLost
from lm.training.launch.signals import ORPHANED

FOLDER, COMMAND = "LM_OUTCOMES", "LM_COMMAND"  # environment variables that the launching process sets
_PR_SET_PDEATHSIG = 1  # prctl.h


class RankFailed(LmError):
    """What ended a run of several processes; the exit code is that of the rank's own error."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Outcome:
    """Of one rank; `exit_code` None while it runs, and for ever where it was killed."""

    rank: int
    pid: int
    at: float  # seconds since 1970
    exit_code: int | None = None
    message: str = ""
    peer_lost: bool = False
    stopped: bool = False  # by a signal, with all saved

    def tell(self) -> None:
        """To whoever launched this process, if someone did."""
        if folder := os.environ.get(FOLDER):
            replace_file(Path(folder) / f"rank-{self.rank}.json", json.dumps(asdict(self)))


def begins(rank: int) -> None:
    """This rank lives; and should the launching process die, it shall end too, with its step finished and saved."""
    Outcome(rank, os.getpid(), time.time()).tell()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ORPHANED)


def ends(rank: int, error: LmError | None) -> None:
    code, message = (error.exit_code, str(error)) if error is not None else (0, "")
    Outcome(rank, os.getpid(), time.time(), code, message, isinstance(error, PeerLost), isinstance(error, Interrupted)).tell()


def read(folder: Path) -> list[Outcome]:
    """Of all ranks of this machine that have begun, as they stand."""
    return [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("rank-*.json"))]


def verdict(outcomes: list[Outcome], killed: dict[int, int]) -> LmError | None:
    """The error that ended a run: the first that is not the mere loss of another rank. killed: rank -> signal number."""
    errors = sorted((found for found in outcomes if found.exit_code), key=lambda found: found.at)
    own = [found for found in errors if not found.peer_lost and not found.stopped]
    if own:
        return RankFailed(_with_rank(own[0]), own[0].exit_code or 1)
    silent = [rank for rank in killed if all(found.rank != rank or found.exit_code is None for found in outcomes)]
    if silent:
        name = signal.Signals(killed[silent[0]]).name
        hint = ", as the system does where memory runs out" if name == "SIGKILL" else ""
        return ResourceError(f"rank {silent[0]}: the process was killed by {name}{hint}. Train again to go on from the last checkpoint.")
    stopped = [found for found in errors if found.stopped]
    if stopped:
        return Interrupted(stopped[0].message, (stopped[0].exit_code or 0) - 128)
    return RankFailed(_with_rank(errors[0]), errors[0].exit_code or 1) if errors else None


def may_pass(error: LmError) -> bool:
    """Whether another start may do better: after a death, a fault of the machine, or where memory or disk ran out. The same config,
    checkpoint and numbers would only fail again, and a signal was meant."""
    return error.exit_code in (LmError.exit_code, ResourceError.exit_code)


def _with_rank(found: Outcome) -> str:
    """The rank before the last line, which is the sentence."""
    *before, last = found.message.splitlines() or ["no message"]
    return "\n".join([*before, f"rank {found.rank}: {last}"])
