"""What a run tells its reader: lines on the terminal, and optional loggers beside metrics.jsonl, none of which can hold up a run."""

import contextlib
import importlib.util
import json
import logging
import math
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from lm.config import Tree
from lm.errors import ConfigError

if TYPE_CHECKING:  # the wandb process imports this module and needs no torch
    from lm.training.config import LoggerConfig, WandbLoggerConfig

log = logging.getLogger("lm")

_HEADER_EVERY = 20
# key in a training record, title, width, format; a column whose key is absent is left out
_COLUMNS = (
    ("loss", "loss", 9, "{:.4f}"),
    ("lr", "lr", 10, "{:.2e}"),
    ("grad_norm", "grad norm", 11, "{:.3f}"),
    ("expert_load", "max load", 10, "{:.2f}x"),
    ("tokens_per_second", "tokens/s", 10, "{:,.0f}"),
    ("mfu_pct", "MFU", 7, "{:.1f}%"),
    ("memory_gib", "memory", 10, "{:.2f} GiB"),
)


class Console:
    """One aligned line per record; with colour on a terminal, plain otherwise. A stdout that is closed only ends the printing."""

    def __init__(self, max_steps: int, clock: Callable[[], float] = time.monotonic, silent: bool = False) -> None:
        self._max_steps = max_steps
        self._clock = clock
        self._since: tuple[int, float] | None = None  # step and time of the first record, after compilation and the like
        self._columns: list[str] = []
        self._lines = 0
        self._closed = silent

    def log(self, record: Tree) -> None:
        """A training record, a validation record or an event, told apart by their keys."""
        if "event" in record:
            rest = "  ".join(f"{key}={value}" for key, value in record.items() if key not in ("step", "event"))
            self._print(f"{self._progress(record)}  {record['event']}  {rest}".rstrip(), "yellow")
        elif "val_loss" in record:
            bits = record.get("val_bits_per_byte")
            shown = f"  {bits:.4f} bits/byte" if bits is not None else ""
            self._print(f"{self._progress(record)}{record['val_loss']:9.4f}  validation{shown}", "green")
        else:
            self._training_line(record)

    def say(self, text: str) -> None:
        """A line between the records."""
        self._print(text, "")

    def _training_line(self, record: Tree) -> None:
        loads = [value for key, value in record.items() if key.startswith("expert_load/")]
        shown = record | ({"expert_load": max(loads)} if loads else {})
        cells = [(title, width, form.format(shown[key])) for key, title, width, form in _COLUMNS if key in shown]
        titles = [title for title, _, _ in cells]
        if titles != self._columns or self._lines % _HEADER_EVERY == 0:
            self._columns, self._lines = titles, 0
            header = "".join(f"{title:>{width}}" for title, width, _ in cells)
            self._print(f"{'step':>8}{'':6}{header}{'ETA':>9}", "bold")
        self._lines += 1
        row = "".join(f"{text:>{width}}" for _, width, text in cells)
        self._print(f"{self._progress(record)}{row}{duration(self._remaining_s(record)):>9}", "")

    def _progress(self, record: Tree) -> str:
        return f"{record['step']:>8,}{record['step'] / self._max_steps:>6.0%}"

    def _remaining_s(self, record: Tree) -> float:
        """From the mean pace since the first line, validations and saves included."""
        step, now = record["step"], self._clock()
        if self._since is None or step <= self._since[0]:
            self._since = (step, now)
            pace = record.get("step_s", math.nan)
        else:
            pace = (now - self._since[1]) / (step - self._since[0])
        return float(pace * (self._max_steps - step))

    def _print(self, text: str, style: str) -> None:
        if self._closed or sys.stdout is None:
            return
        try:
            _write(sys.stdout, text, style)
        except (OSError, ValueError):  # a closed pipe or file
            self._closed = True
            _silence(sys.stdout)


def _write(stream: TextIO, text: str, style: str) -> None:
    if stream.isatty():
        from rich.console import Console as RichConsole

        terminal = RichConsole(file=stream, markup=False, highlight=False)
        terminal.print(text, style=style or None, soft_wrap=True)
    else:
        stream.write(text + "\n")
    stream.flush()


def _silence(stream: TextIO) -> None:
    """Python flushes stdout again at exit, and would exit 120 for a pipe that nobody reads."""
    with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def duration(seconds: float) -> str:
    """45s, 1m23s, 2h05m, 3d04h; ? where unknown."""
    if not math.isfinite(seconds):
        return "?"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h"
    if hours:
        return f"{h}h{m:02}m"
    return f"{m}m{s:02}s" if m else f"{s}s"


class Logger(Protocol):
    """Somewhere else to send the records of metrics.jsonl. Neither method raises, and close takes at most `CLOSE_S`."""

    def log(self, record: Tree) -> None: ...

    def close(self) -> None: ...


CLOSE_S = 8.0
INIT_S = 30.0  # until a server that does not answer is given up for an offline run; the training waits for none of it


def build_loggers(cfg: "LoggerConfig", folder: Path, config: Tree, step: int = 0) -> list[Logger]:
    """The loggers beside metrics.jsonl. `config` is what they show as the run's settings; `step` is where a resumed run goes on."""
    if cfg.kind == "tensorboard":
        _require("tensorboard", "tensorboard")
        return [TensorBoard(folder, config, step)]
    if cfg.kind == "wandb":
        _require("wandb", "wandb")
        return [Wandb(cfg, folder, config)]
    return []


def _require(module: str, kind: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"logger: kind={kind} needs the package {module}, which is not installed. Run: pip install {module}")


class TensorBoard:
    """Event files under `tensorboard/` of the run folder; steps that a resumed run repeats are purged."""

    def __init__(self, folder: Path, config: Tree, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._broken = False
        self._writer: Any = None
        self._guarded(lambda: self._open(SummaryWriter, folder, config, step))

    def _open(self, writer: Any, folder: Path, config: Tree, step: int) -> None:
        self._writer = writer(str(folder / "tensorboard"), purge_step=step + 1 if step else None)
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```", step)

    def log(self, record: Tree) -> None:
        self._guarded(lambda: self._scalars(record))

    def _scalars(self, record: Tree) -> None:
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float):
                self._writer.add_scalar(key, value, record["step"])

    def close(self) -> None:
        self._guarded(lambda: self._writer.close())

    def _guarded(self, act: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            act()
        except Exception as error:  # whatever it is, it must not end the run
            self._broken = True
            log.warning("tensorboard stopped: %s. The run goes on; metrics.jsonl has everything.", error)


class Wandb:
    """Weights & Biases in a process of its own, which reads records from a pipe and can be killed.

    Its client waits for servers at the start, at the end and in atexit hooks; none of that reaches the run.
    """

    def __init__(self, cfg: "WandbLoggerConfig", folder: Path, config: Tree) -> None:
        self._records: queue.SimpleQueue[Tree | None] = queue.SimpleQueue()
        self._records.put({"project": cfg.project, "entity": cfg.entity, "dir": str(folder), "name": folder.name, "config": config})
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from lm.training.logging import wandb_process; wandb_process()"],
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
