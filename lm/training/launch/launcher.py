"""A run of several processes: the config is frozen once, torch's elastic agent starts the ranks, and the first rank's error is raised."""

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
from typing import Any

from lm.errors import ConfigError, Interrupted, LmError, ResourceError
from lm.printing import note, say
from lm.progress import quiet
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig
from lm.training.launch import outcome, parent
from lm.training.launch.children import Received
from lm.training.launch.rendezvous import require_place

WORKER = "lm.training.worker"
_POLL_S = 0.1
_ABANDON_S = 10.0  # after a rank fails, the others get this long to end


def launch(cfg: TrainConfig, command: str | None = None) -> None:
    """Trains with the ranks of `cfg.launch` on this machine. Raises the first failing rank's error; Interrupted after a signal, when
    everything is saved."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # each of torchrun's processes would start all ranks
        how = "Leave torchrun out, or give it -m lm.training.worker and the run's config.yaml"
        raise ConfigError(f"launch: torchrun has started this process, and lm train starts its ranks itself. {how}.")
    if cfg.launch.rendezvous is not None:
        require_place(cfg.launch.rendezvous)
    if cfg.launch.nodes > 1:
        say(f"launch: waits up to {cfg.launch.timeout_s:,} s for {cfg.launch.nodes} machines to meet at {cfg.launch.rendezvous}")
    with tempfile.TemporaryDirectory(prefix="lm-ranks-") as name:
        RunFolder(Path(name)).write_config(cfg.tree())  # rank 0 writes the run folder's, once it knows that this config may train there
        threads = str(max(1, (os.cpu_count() or 1) // cfg.launch.devices))
        told = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), "TORCH_CPP_LOG_LEVEL": "FATAL"}
        told["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else restarted ranks find the addresses of the ranks before them
        with quiet(), _environment(told | ({outcome.COMMAND: command} if command else {})):  # the first rank prints
            error = _Launcher(cfg, Path(name)).run()
    if error is not None:
        raise error


class _Launcher:
    """Starts the ranks by torch.distributed.run's agent, in a thread, and restarts them where that may help. Forwards signals to the ranks,
    which finish their step and save. The agent's own restarts are not used: it cannot tell a wrong config from a lost machine."""

    def __init__(self, cfg: TrainConfig, folder: Path) -> None:
        """folder: holds the ranks' config.yaml; the ranks write their outcomes below it."""
        self._cfg, self._folder = cfg, folder
        self._received = Received()
        self._killed: dict[int, int] = {}
        self._silent: dict[int, str] = {}
        self._error: BaseException | None = None

    def run(self) -> LmError | None:
        """Waits until all ranks have ended and no restart is left; returns the error of the first rank that failed."""
        with self._received:
            error = self._attempt(0)
            for number in range(1, self._cfg.launch.max_restarts + 1):
                if error is None or self._received.numbers or not outcome.may_pass(error):
                    break
                note(error.sentence)
                note(f"launch: start {number} of launch.max_restarts={self._cfg.launch.max_restarts}")
                error = self._attempt(number)
        return error

    def _attempt(self, number: int) -> LmError | None:
        self._outcomes = self._folder / str(number)
        self._outcomes.mkdir()
        self._killed, self._silent = {}, {}
        with _environment({outcome.FOLDER: str(self._outcomes), **parent.named()}):
            thread = threading.Thread(target=self._start, name="agent", daemon=True)
            thread.start()
            self._look_after(thread)
        found = outcome.read(self._outcomes)
        ours = {*self._received.numbers} & {*self._killed.values()}  # that came before a rank handled them
        error = outcome.verdict(found, {} if ours else self._killed, self._silent)
        if self._error is not None and not outcome.complete(found):
            if error is None or not isinstance(self._error, LmError):
                raise self._error
            note(self._error.sentence)  # what the ranks say of it follows
        if error is None and self._received.numbers and not outcome.complete(found):
            came = self._received.numbers[0]
            raise Interrupted(f"launch: {signal.Signals(came).name} came before the ranks ran.", came)
        return error

    def _look_after(self, thread: threading.Thread) -> None:
        """Forwards each signal to each rank once, also to ranks that begin later; records which ranks keep the others waiting. Where all
        ranks of this machine have ended, and not well, the agent is given up after a while: it waits for machines that may be dead."""
        told: set[tuple[int, int]] = set()
        since = time.monotonic()
        while thread.is_alive() and time.monotonic() - since < _ABANDON_S:
            thread.join(_POLL_S)
            found = outcome.read(self._outcomes)
            living = [rank for rank in found if rank.exit_code is None]
            if not self._silent and any(rank.peer_lost for rank in found):
                self._silent = {rank.rank: rank.state() for rank in living}
                for rank in living:
                    if self._silent[rank.rank] in "Tt":
                        _send(rank.pid, signal.SIGKILL)  # a stopped process handles no other signal
            running = [rank.pid for rank in living if not rank.gone()]
            if len(self._received.numbers) > 1 and not found:
                return
            if running or not (self._received.numbers or any(rank.exit_code or rank.gone() for rank in found)):
                since = time.monotonic()
            for turn, number in enumerate([*self._received.numbers]):
                for pid in running:
                    if (turn, pid) not in told:
                        told.add((turn, pid))
                        _send(pid, number)
        if thread.is_alive():
            self._killed = {rank.rank: signal.SIGKILL for rank in found if rank.gone()}  # by what, only the agent could say

    def _start(self) -> None:
        from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        elastic = logging.getLogger("torch.distributed.elastic")  # some loggers below it have levels of their own
        elastic.propagate, elastic.handlers = False, [logging.NullHandler()]
        where = self._cfg.launch
        try:
            has_limit = "shutdown_timeout" in LaunchConfig.__dataclass_fields__  # not in torch 2.11
            limit: dict[str, Any] = {"shutdown_timeout": int(_ABANDON_S)} if has_limit else {}
            config = LaunchConfig(
                min_nodes=where.nodes,
                max_nodes=where.nodes,
                nproc_per_node=where.devices,
                run_id=self._cfg.run.name if where.nodes > 1 else uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint=where.rendezvous or "localhost:0",
                rdzv_configs={"join_timeout": where.timeout_s},
                max_restarts=0,
                monitor_interval=_POLL_S,
                logs_specs=DefaultLogsSpecs(str(self._folder / "logs")),  # else an empty folder of torch's is left behind
                **limit,
            )
            elastic_launch(config, sys.executable)("-m", WORKER, str(RunFolder(self._folder).config_file))
        except ChildFailedError as error:
            self._killed = {rank: -failure.exitcode for rank, failure in error.failures.items() if failure.exitcode < 0}
        except RendezvousError as error:
            self._error = self._unmet(" ".join(str(error).split())[:200])
        except BaseException as error:
            self._error = error

    def _unmet(self, said: str) -> LmError:
        where = self._cfg.launch
        if outcome.read(self._outcomes):
            fault = f"the command of the machine that holds it has ended or does not answer ({said}). {outcome.AGAIN}"
        else:
            said = said or f"not within launch.timeout_s={where.timeout_s}"  # torch's error of that has no text
            remedy = "Start the same command on each of them, and check that all reach that address."
            fault = f"the {where.nodes} machines did not meet ({said}). {remedy}"
        return ResourceError(f"launch.rendezvous={where.rendezvous}: {fault}")


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Inside the block these variables are in the environment, which child processes inherit."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)
