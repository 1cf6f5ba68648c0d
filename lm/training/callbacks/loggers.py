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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from lm.errors import ConfigError
from lm.schema import Named, Slot, Tree
from lm.storage.run_folder import RunFolder
from lm.training.callbacks.csv_file import Csv

log = logging.getLogger("lm")


class Logger(Protocol):
    """A further destination for the records of metrics.jsonl and the samples. No method raises, and close takes at most `CLOSE_S`."""

    def log(self, record: Tree) -> None: ...

    def samples(self, step: int, texts: Sequence[str]) -> None: ...

    def close(self) -> None: ...


_PERF = ("tokens_per_second", "step_s", "data_s", "memory_gib", "mfu_pct")
_DATA = ("tokens", "epochs")


def grouped(record: Tree) -> dict[str, float]:
    """Returns a record's numbers by hierarchical tags: train/loss, val/loss, val/loss/NAME, test/loss, perf/step_s, data/tokens,
    experts/NAME."""
    found = {}
    for key, value in record.items():
        if key == "step" or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        name, _, part = key.partition("/")
        if name.startswith(("val_", "test_")):
            tag = key.replace("_", "/", 1)
        elif name == "expert_load":
            tag = f"experts/{part}"
        else:
            tag = f"{'perf' if name in _PERF else 'data' if name in _DATA else 'train'}/{key}"
        found[tag] = value
    return found


CLOSE_S = 8.0
INIT_S = 30.0  # wait for a server before going offline; training does not wait for it


class LoggerConfig(Slot, group="logger"):
    """Where metrics go beside metrics.jsonl, which is always written."""

    def build(self, folder: Path, config: Tree, step: int) -> list[Logger]:
        """Returns the loggers of a run folder. config: shown as the run's settings.  step: the step from which a resumed run goes on."""
        return []

    def require(self) -> None:
        """Raises ConfigError where a package that the logger needs is not installed."""

    def _require(self, package: str) -> None:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"logger: kind={self.kind} needs the package {package}. Run: pip install 'slotlm[{package}]'")


class JsonlLoggerConfig(LoggerConfig):
    """metrics.jsonl alone, which is always written."""

    kind: Literal["jsonl"] = "jsonl"


class SeveralLoggerConfig(LoggerConfig):
    """Several of them at once: logger=[wandb,tensorboard]."""

    kind: Literal["several"] = "several"
    each: Named[LoggerConfig] = {}
    """The loggers by name; one without `kind` is of the kind that its name says, as in logger.each.wandb.project=mine."""

    def require(self) -> None:
        for one in self.each.values():
            one.require()

    def build(self, folder: Path, config: Tree, step: int) -> list[Logger]:
        return [logger for one in self.each.values() for logger in one.build(folder, config, step)]


class CsvLoggerConfig(LoggerConfig):
    """metrics.jsonl and, at each validation and at the end, the same as metrics.csv with a column for each number."""

    kind: Literal["csv"] = "csv"

    def build(self, folder: Path, config: Tree, step: int) -> list[Logger]:
        return [Csv(RunFolder(folder))]


class TensorBoardLoggerConfig(LoggerConfig):
    """metrics.jsonl and TensorBoard event files in the run folder."""

    kind: Literal["tensorboard"] = "tensorboard"

    def require(self) -> None:
        self._require("tensorboard")

    def build(self, folder: Path, config: Tree, step: int) -> list[Logger]:
        self.require()
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
        with self._guarded():
            for tag, value in grouped(record).items() if self._writer is not None else ():
                self._writer.add_scalar(tag, value, record["step"])

    def samples(self, step: int, texts: Sequence[str]) -> None:
        with self._guarded():
            if self._writer is not None:  # it renders markdown, where an indented line is shown verbatim
                blocks = ["\n".join(f"    {line}" for line in text.splitlines()) for text in texts]
                self._writer.add_text("samples", "\n\n---\n\n".join(blocks), step)

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

    def require(self) -> None:
        self._require("wandb")

    def build(self, folder: Path, config: Tree, step: int) -> list[Logger]:
        self.require()
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
        """Writes the queued records to the pipe. The pipe may block while a server stalls, so only this thread touches it."""
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
        self._records.put({"step": record["step"], "numbers": grouped(record)})

    def samples(self, step: int, texts: Sequence[str]) -> None:
        self._records.put({"step": step, "samples": list(texts)})

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
    """Runs in the logger's process and reads the pipe: the first line has wandb.init's options, the others are records. Goes offline where
    logging in fails."""
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
        found = record.get("numbers") or {"samples": wandb.Table(["sample"], [[text] for text in record.get("samples", [])])}
        if "samples" in record or record["numbers"]:
            run.log(found, step=record["step"])
    deadline = threading.Timer(CLOSE_S, os._exit, (1,))  # finish waits for the server, and the run may be gone
    deadline.start()
    run.finish()
    deadline.cancel()


def _run_id(folder: Path) -> str:
    """Returns the id of the folder's wandb run, which is created once and kept when the run is resumed."""
    path = folder / "wandb" / "run-id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4))
    return path.read_text()
