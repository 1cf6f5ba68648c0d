"""Optional loggers beside metrics.jsonl, none of which can hold up a run."""

import importlib.util
import json
import logging
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from lm.errors import ConfigError
from lm.schema import Slot, Tree

log = logging.getLogger("lm")


class Logger(Protocol):
    """Somewhere else to send the records of metrics.jsonl. Neither method raises, and close takes at most `CLOSE_S`."""

    def log(self, record: Tree) -> None: ...

    def close(self) -> None: ...


CLOSE_S = 8.0
INIT_S = 30.0  # until a server that does not answer is given up for an offline run; the training waits for none of it


class LoggerConfig(Slot, group="logger"):
    """Where metrics go beside metrics.jsonl, which is always written."""

    def build(self, folder: Path, config: Tree, step: int) -> list[Logger]:
        """Returns the loggers of a run folder. config: what they show as the run's settings.  step: where a resumed run goes on."""
        return []

    def _require(self, package: str) -> None:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"logger: kind={self.kind} needs the package {package}, which is not installed. Run: pip install {package}")


class JsonlLoggerConfig(LoggerConfig):
    """metrics.jsonl alone, which is always written."""

    kind: Literal["jsonl"] = "jsonl"


class TensorBoardLoggerConfig(LoggerConfig):
    """metrics.jsonl and TensorBoard event files in the run folder."""

    kind: Literal["tensorboard"] = "tensorboard"

    def build(self, folder: Path, config: Tree, step: int) -> list[Logger]:
        self._require("tensorboard")
        return [TensorBoard(folder, config, step)]


class TensorBoard:
    """Event files under `tensorboard/` of the run folder; steps that a resumed run repeats are purged."""

    def __init__(self, folder: Path, config: Tree, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = None
        with self._guarded():
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)
            self._writer.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```", step)

    def log(self, record: Tree) -> None:
        numbers = {key: value for key, value in record.items() if key != "step" and isinstance(value, int | float)}
        with self._guarded():
            for key, value in numbers.items() if self._writer is not None else ():
                self._writer.add_scalar(key, value, record["step"])

    def close(self) -> None:
        with self._guarded():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, it must not end the run
            self._writer = None
            log.warning("tensorboard stopped: %s. The run goes on; metrics.jsonl has everything.", error)


class WandbLoggerConfig(LoggerConfig):
    """metrics.jsonl and Weights & Biases, offline when not logged in."""

    kind: Literal["wandb"] = "wandb"
    project: str = "lm"
    """Project name."""
    entity: str | None = None
    """Team or user. null: the default one."""

    def build(self, folder: Path, config: Tree, step: int) -> list[Logger]:
        self._require("wandb")
        return [Wandb(self, folder, config)]


class Wandb:
    """Weights & Biases in a process of its own, which reads records from a pipe and can be killed.

    Its client waits for servers at the start, at the end and in atexit hooks; none of that reaches the run.
    """

    def __init__(self, cfg: WandbLoggerConfig, folder: Path, config: Tree) -> None:
        self._records: queue.SimpleQueue[Tree | None] = queue.SimpleQueue()
        self._records.put({"project": cfg.project, "entity": cfg.entity, "dir": str(folder), "name": folder.name, "config": config})
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from lm.training.callbacks.loggers import wandb_process; wandb_process()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C is for the run alone
                env={"WANDB_ERROR_REPORTING": "false", **os.environ},
            )
        except OSError as error:
            self._warn(str(error))
            return
        threading.Thread(target=self._feed, args=(self._process,), daemon=True).start()

    def _feed(self, process: "subprocess.Popen[str]") -> None:
        """The pipe may block while a server stalls, so only this thread touches it."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            while (record := self._records.get()) is not None:
                process.stdin.write(json.dumps(record) + "\n")
                process.stdin.flush()
                if "project" in record and (where := process.stdout.readline().strip()):
                    log.warning("wandb: %s", where)
            process.stdin.close()
        except OSError:
            pass  # the process is gone; close says so

    def log(self, record: Tree) -> None:
        self._records.put(record)

    def close(self) -> None:
        if self._process is None:
            return
        self._records.put(None)
        try:
            if self._process.wait(CLOSE_S) != 0:
                self._warn(f"its process ended with code {self._process.returncode}")
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._warn(f"not finished within {CLOSE_S:.0f} s, and may lack the last records")

    def _warn(self, reason: str) -> None:
        log.warning("wandb stopped: %s. The run is not affected; metrics.jsonl has everything.", reason)


def wandb_process() -> None:
    """The other end of the pipe: the first line says what to open, the others are records. Offline where logging in fails."""
    import wandb

    first = json.loads(sys.stdin.readline())
    options = {key: first[key] for key in ("project", "entity", "dir", "name", "config")}
    settings = wandb.Settings(silent=True, console="off", init_timeout=INIT_S)
    run_id = _run_id(Path(first["dir"]))
    try:
        run = wandb.init(**options, id=run_id, resume="allow", settings=settings)
    except wandb.Error as error:  # not logged in, refused, or no answer
        run = wandb.init(**options, id=run_id, resume="allow", mode="offline", settings=settings)
        print(f"offline ({str(error).splitlines()[0]}); `wandb sync {Path(run.dir).parent}` uploads it", flush=True)
    else:
        print(run.url or f"offline in {run.dir}", flush=True)
    for line in sys.stdin:
        record = json.loads(line)
        run.log(record, step=record["step"])
    deadline = threading.Timer(CLOSE_S, os._exit, (1,))  # finish waits for the server, and the run may be gone
    deadline.start()
    run.finish()
    deadline.cancel()


def _run_id(folder: Path) -> str:
    """One wandb run per run folder, however often it is resumed."""
    path = folder / "wandb" / "run-id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4))
    return path.read_text()
