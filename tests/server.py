"""`lm` without 4 seconds of imports for each process: this program has done them, and forks itself for every command and every rank.

Nothing else differs from a fresh interpreter: arguments, environment, working folder, output and signals are those of a process.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

ROOT = Path(__file__).parents[1]
HEAVY = ("lightning", "lm.report.curves", "lm.training.run", "torch.utils.tensorboard", "torch.distributed.run")


class Process:
    """A command of `server`, in a process group of its own; its output is read from files when it has ended."""

    def __init__(self, server: "subprocess.Popen[str]", folder: Path, args: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """args: of Python: `-m lm ...`.  folder: the one it works in, and for its output."""
        assert server.stdin is not None and server.stdout is not None
        self._folder, self._answers = folder / "output", server.stdout
        self._folder.mkdir(exist_ok=True)
        outputs = [str(self._folder / "stdout"), str(self._folder / "stderr")]
        request = {"args": list(args), "outputs": outputs, "env": dict(env or os.environ), "cwd": str(folder)}
        print(json.dumps(request), file=server.stdin, flush=True)
        self.pid = int(server.stdout.readline())

    def wait(self) -> int:
        """Its exit code; minus the signal's number where one ended it."""
        return int(self._answers.readline())

    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()


class Forked:
    """As much of subprocess.Popen as torch's elastic agent asks for."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], outputs: Sequence[str] = (), cwd: str = ".") -> None:
        sys.stdout.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(args, env, outputs, cwd)

    def poll(self) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        begun = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - begun > timeout:
                raise subprocess.TimeoutExpired("python", timeout)
            time.sleep(0.005)
        return code


def _become(args: Sequence[str], env: Mapping[str, str], outputs: Sequence[str], cwd: str) -> NoReturn:
    """python ARGS, in this process, which was forked for it."""
    code = 1
    try:
        os.setsid()
        for name, number in zip(outputs, (1, 2), strict=False):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
        flag, module, *sys.argv[1:] = args
        assert flag == "-m"
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def serve() -> None:
    """A request is a line of JSON; the answers are the process and, when it has ended, its exit code."""
    for name in HEAVY:
        __import__(name)
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    def popen(handler: Any, args: Sequence[str], env: Mapping[str, str]) -> Any:
        return Forked(args[1:], env)  # without the name of the interpreter

    SubprocessHandler._popen = popen  # type: ignore[assignment,method-assign]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 3)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(3, 0)
    while line := requests.readline():
        request = cast(dict[str, Any], json.loads(line))
        process = Forked(request["args"], request["env"], request["outputs"], request["cwd"])
        print(process.pid, flush=True)
        print(process.wait(), flush=True)


if __name__ == "__main__":
    serve()
