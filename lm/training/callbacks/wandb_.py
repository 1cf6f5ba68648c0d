"""Weights & Biases, as a logger: a process of its own that reads records from a pipe."""

import contextlib
import json
import logging
import os
import queue
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.schema import Tree
from lm.training.callbacks.tags import grouped

log = logging.getLogger("lm")

CLOSE_S = 8.0
INIT_S = 30.0  # wait for a server before going offline; training does not wait for it


class Wandb:
    """Weights & Biases in a process of its own, which reads records from a pipe and can be killed.

    Its client waits for servers at the start, at the end and in atexit hooks; none of that reaches the run.
    """

    def __init__(self, folder: Path, config: Tree, options: Tree) -> None:
        """folder: of the run.  options: of the logger's config; what is empty there is left to wandb's environment variables."""
        self._records: queue.SimpleQueue[Tree | None] = queue.SimpleQueue()
        self._records.put({"options": options, "folder": str(folder), "name": folder.name, "config": config, "pid": os.getpid()})
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False  # from then on nothing is kept for it, which a run of weeks would hold in memory
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from lm.training.callbacks.wandb_ import wandb_process; wandb_process()"],
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
        self._told = threading.Thread(target=self._tell, args=(self._process,), daemon=True)
        for thread in (self._told, threading.Thread(target=self._feed, args=(self._process,), daemon=True)):
            thread.start()

    def _feed(self, process: "subprocess.Popen[str]") -> None:
        """Writes the queued records to the pipe, which holds those of the time until wandb has begun, even if the run is killed. The pipe
        may block while a server stalls, so only this thread touches it."""
        assert process.stdin is not None
        try:
            while (record := self._records.get()) is not None:
                process.stdin.write(json.dumps(record) + "\n")
                process.stdin.flush()
            process.stdin.close()
        except OSError:  # the process is gone
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._warn(f"its process ended with code {process.wait(CLOSE_S)}")

    @staticmethod
    def _tell(process: "subprocess.Popen[str]") -> None:
        """Says where the run is seen, once wandb has begun."""
        assert process.stdout is not None
        if where := process.stdout.readline().strip():
            log.warning("wandb: %s", where)

    def log(self, record: Tree) -> None:
        self._keep({"step": record["step"], "numbers": grouped(record)})

    def samples(self, step: int, texts: Sequence[str]) -> None:
        self._keep({"step": step, "samples": list(texts)})

    def _keep(self, record: Tree) -> None:
        if not self._stopped:
            self._records.put(record)

    def go_back(self, step: int) -> None:
        """Does nothing: what was sent stays, and the rows of repeated steps come behind it."""

    def close(self, summary: Tree | None) -> None:
        if self._process is None:
            return
        if summary is not None:
            self._records.put({"summary": summary})
        self._records.put(None)
        try:
            code = self._process.wait(CLOSE_S)
            self._told.join(1)
            if code != 0:
                self._warn(f"its process ended with code {code}")
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._warn(f"not finished within {CLOSE_S:.0f} s, and may lack the last records")

    def _warn(self, reason: str) -> None:
        """Says so, once."""
        if self._stopped:
            return
        self._stopped = True
        log.warning("wandb stopped: %s. The run is not affected; metrics.jsonl has everything.", reason)


def wandb_process() -> None:
    """Runs in the logger's process and reads the pipe: the first line has wandb.init's options, the others are records. Goes offline where
    logging in fails.

    The step is a figure of each row and the axis of all others, since wandb drops rows of a step that it has: after a kill the validation
    of a step may come when its loss is there already. A run whose summary never comes has failed.
    """
    import wandb

    first = json.loads(sys.stdin.readline())
    try:
        run, told = _begin(first)
    except Exception as error:  # of an option or a variable that wandb does not take
        print(f"it does not begin: {' '.join(str(error).split())[:300]}", flush=True)
        sys.exit(1)
    with contextlib.suppress(BrokenPipeError):  # nobody is left to be told, but the pipe has records
        print(told, flush=True)
    run.define_metric("*", step_metric="step")
    complete = False
    for line in sys.stdin:
        if not line.endswith("\n"):  # torn, since the run was killed
            break
        record = json.loads(line)
        if numbers := record.get("numbers"):
            run.log(numbers | {"step": record["step"]})
        elif "samples" in record:
            run.log({"samples": wandb.Table(["sample"], [[text] for text in record["samples"]]), "step": record["step"]})
        elif "summary" in record:
            run.summary.update(record["summary"])
            complete = True
    deadline = threading.Timer(CLOSE_S, os._exit, (1,))  # finish waits for the server, and the run may be gone
    deadline.start()
    run.finish(exit_code=0 if complete else 1)
    deadline.cancel()


def _begin(first: Tree) -> tuple[Any, str]:
    """Returns the run that the pipe's first line asks for, and where it is seen."""
    import wandb

    folder, options = str(first["folder"]), {key: value or None for key, value in first["options"].items()}
    options["project"] = options["project"] or os.environ.get("WANDB_PROJECT") or "lm"
    options["group"] = options.pop("run_group")
    options |= {"name": os.environ.get("WANDB_NAME") or first["name"], "config": first["config"]}
    kept = Path(folder) / "wandb" / "run-id"
    options |= {"dir": folder, "id": os.environ.get("WANDB_RUN_ID") or _kept_id(kept), "resume": "allow"}
    options["settings"] = wandb.Settings(silent=True, console="off", init_timeout=INIT_S, x_stats_pid=first["pid"])
    try:
        run, why = wandb.init(**options), ""
    except wandb.Error as error:  # not logged in, refused, or no answer
        wandb.teardown()  # whose service holds the run's id after a start that failed
        run, why = wandb.init(**options | {"mode": "offline"}), f" ({str(error).partition(chr(10))[0]})"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(run.id)  # of WANDB_RUN_ID, which `wandb agent` sets, too
    upload = f"`wandb sync {shlex.quote(folder)}/wandb/offline-run-*` uploads it"
    return run, "off, by WANDB_MODE" if run.disabled else run.url or f"offline{why}; {upload}"


def _kept_id(file: Path) -> str:
    """Returns the id of the folder's wandb run, which is created once and kept when the run is resumed."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4))
    return file.read_text()
