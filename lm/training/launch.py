"""A run of several processes: its config is frozen once, torch's elastic agent starts the ranks, and their first error is its error."""

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from lm.errors import Interrupted
from lm.folder import RunLock
from lm.training import outcome
from lm.training.config import TrainConfig
from lm.training.resume import CONFIG, require_resumable, write_config

WORKER = "lm.training.worker"
_POLL_S = 0.1
_ABANDON_S = 10.0  # the others of a failed rank get that long to end


def launch(cfg: TrainConfig, command: str | None = None) -> None:
    """Train with the ranks of `cfg.launch` on this machine. Raises the first rank's error; Interrupted after a signal, with all saved."""
    folder = Path(cfg.run.dir).expanduser() / cfg.run.name
    require_resumable(folder, cfg)
    with tempfile.TemporaryDirectory(prefix="lm-ranks-") as name:
        where = folder
        if cfg.launch.nodes == 1:
            with RunLock(folder):
                write_config(folder, cfg)
        else:  # each machine its own, and rank 0 the one in the run folder
            where = Path(name)
            write_config(where, cfg)
        threads = str(max(1, (os.cpu_count() or 1) // cfg.launch.devices))
        told = {outcome.FOLDER: name, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        told["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else ranks that are started again find the addresses of those before
        with _environment(told | ({outcome.COMMAND: command} if command else {})):
            killed = _Agent(cfg, where / CONFIG, Path(name)).run()
        error = outcome.verdict(outcome.read(Path(name)), killed)
    if error is not None:
        raise error


class _Agent:
    """torch.distributed.run's own agent, in a thread; this one hands signals on to the ranks, which finish their step and save."""

    def __init__(self, cfg: TrainConfig, config: Path, outcomes: Path) -> None:
        self._cfg, self._config, self._outcomes = cfg, config, outcomes
        self._caught: list[int] = []
        self._killed: dict[int, int] = {}
        self._error: BaseException | None = None

    def run(self) -> dict[int, int]:
        """Until all ranks have ended: which of them were killed, and by which signal."""
        thread = threading.Thread(target=self._start, name="agent", daemon=True)
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        try:
            thread.start()
            self._hand_signals_on(thread)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._error is not None:
            raise self._error
        return self._killed

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught.append(number)

    def _hand_signals_on(self, thread: threading.Thread) -> None:
        """Each signal once to each rank, also to one that begins only later."""
        told: set[tuple[int, int]] = set()
        since = time.monotonic()
        while thread.is_alive():
            thread.join(_POLL_S)
            running = [found.pid for found in outcome.read(self._outcomes) if found.exit_code is None]
            if not self._caught or running:
                since = time.monotonic()
            if time.monotonic() - since > _ABANDON_S:  # waiting for other machines, say
                raise Interrupted(f"launch: {signal.Signals(self._caught[0]).name} came before the ranks ran.", self._caught[0])
            for key in [(turn, pid) for turn in range(len(self._caught)) for pid in running]:
                if key not in told:
                    told.add(key)
                    _send(key[1], self._caught[key[0]])

    def _start(self) -> None:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        where = self._cfg.launch
        config = LaunchConfig(
            min_nodes=where.nodes,
            max_nodes=where.nodes,
            nproc_per_node=where.devices,
            run_id=self._cfg.run.name if where.nodes > 1 else uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=where.rendezvous or "localhost:0",
            max_restarts=where.max_restarts,
            monitor_interval=_POLL_S,
            shutdown_timeout=int(_ABANDON_S),
        )
        try:
            elastic_launch(config, sys.executable)("-m", WORKER, str(self._config))
        except ChildFailedError as error:
            self._killed = {rank: -failure.exitcode for rank, failure in error.failures.items() if failure.exitcode < 0}
        except BaseException as error:
            self._error = error


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """What child processes inherit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
