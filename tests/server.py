"""`lm` without 4 seconds of imports for each process: this program has done them, and forks itself for every command and every rank.

Nothing else differs from a fresh interpreter: arguments, environment, working folder, output and signals are those of a process.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from lm import progress
from lm.data.store.cache import code_version
from tests.client import ask

ROOT = Path(__file__).parents[1]
HEAVY = ("lightning", "lm.report.curves", "lm.training.run", "torch.utils.tensorboard", "torch.distributed.run")


class Process:
    """A command of the server at this socket, in a process group of its own; its output is in files."""

    def __init__(self, server: Path, folder: Path, args: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """args: of Python: `-m lm ...`.  folder: the one it works in, and for its output."""
        self._folder = folder / "output"
        self._folder.mkdir(exist_ok=True)
        with ExitStack() as stack:
            names: tuple[str | Path, ...] = (os.devnull, self._folder / "stdout", self._folder / "stderr")
            files = [stack.enter_context(open(name, "w" if number else "r")) for number, name in enumerate(names)]
            found = ask(str(server), args, env or os.environ, str(folder), [file.fileno() for file in files])
        self.pid, self._answers = found

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

    def __init__(self, args: Sequence[str], env: Mapping[str, str], outputs: Sequence[int] = (), cwd: str = ".") -> None:
        """args: of Python.  outputs: become stdin, stdout and stderr."""
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


def _become(args: Sequence[str], env: Mapping[str, str], outputs: Sequence[int], cwd: str) -> NoReturn:
    """python ARGS, in this process, which was forked for it."""
    code = 1
    try:
        os.setsid()
        for number, given in enumerate(outputs):
            os.dup2(given, number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None  # of the environment before
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


def serve(path: str) -> None:
    """A request is three open files and a line of JSON; the answers are the process and, when it has ended, its exit code."""
    for name in HEAVY:
        __import__(name)
    code_version()  # reads the sources of a hundred modules, once
    progress._SILENT_S = 600.0  # as in conftest.py
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    def popen(handler: Any, args: Sequence[str], env: Mapping[str, str]) -> Any:
        return Forked(args[1:], env)  # without the name of the interpreter

    SubprocessHandler._popen = popen  # type: ignore[assignment,method-assign]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> NoReturn:
    try:
        _, outputs, _, _ = socket.recv_fds(connection, 1, 3)
        stream = connection.makefile("rw", encoding="utf-8")
        request = json.loads(stream.readline())
        process = Forked(request["args"], request["env"], outputs, request["cwd"])
        for output in outputs:
            os.close(output)
        with suppress(BrokenPipeError):
            print(process.pid, file=stream, flush=True)
            print(process.wait(), file=stream, flush=True)
    finally:
        os._exit(0)


@contextmanager
def serving(folder: Path) -> Iterator[Path]:
    """The socket of a server that lives as long as the block."""
    path = folder / "server"
    command = [sys.executable, "-m", "tests.server", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield path
        finally:
            process.kill()


if __name__ == "__main__":
    serve(sys.argv[1])
