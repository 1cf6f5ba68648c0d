"""Runs chat templates, which are programs that come with a model, in jinja's sandbox and in a process with little memory and time."""

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from lm.data.tokenizer import rendering
from lm.errors import ConfigError
from lm.schema import Tree

_MAX_SOURCE = 1 << 16  # characters


class Program:
    """A child process that answers questions, over two pipes. It ends with this object, or with the process that owns this object."""

    def __init__(self, file: str, begin: Any) -> None:
        """file: the Python program; it writes {"result": ...} or {"error": ...} for each line that it reads.  begin: the first line."""
        self._file, self._begin = file, begin
        self.begun = self._start()
        """What it says to `begin`."""

    def _start(self) -> Tree:
        command = [sys.executable, "-P", self._file]  # -P: modules beside that file have common names
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        weakref.finalize(self, _end, self._process)
        return self._asked(self._begin)

    def ask(self, question: Any) -> Tree:
        """Returns {"result": ...} or {"error": ...}, also where the question is more than the process takes, which ends it."""
        if self._process.poll() is not None:  # the question before killed it
            self._start()
        return self._asked(question)

    def _asked(self, question: Any) -> Tree:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        answer: Tree = json.loads(line) if line else {"error": _why(process.wait())}
        return answer


class Template:
    """Renders one template in a process."""

    def __init__(self, source: str, where: str) -> None:
        """Raises ConfigError where the source is too long or cannot be read."""
        if len(source) > _MAX_SOURCE:
            raise ConfigError(f"{where}: a chat template of {len(source):,} characters is over {_MAX_SOURCE:,}. Use a shorter one.")
        self._where, self._program = where, Program(rendering.__file__, source)
        if error := self._program.begun.get("error"):
            raise ConfigError(f"{where}: the chat template cannot be read ({error}). Mend it.")

    def render(self, messages: Sequence[Tree], names: Tree) -> str:
        """Returns the text, with {% generation %} blocks between OPEN and CLOSE.  names: further variables.  Raises ConfigError."""
        answer = self._program.ask({"messages": messages, **names})
        if "error" in answer:
            raise ConfigError(f"{self._where}: the chat template fails ({answer['error']}). Mend it, or the messages.")
        return str(answer["result"])


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def _why(code: int) -> str:
    """Returns why the process ended, by its exit code."""
    if code == -signal.SIGPROF:
        return "it takes more than a second"
    return f"its process ended with {signal.Signals(-code).name if code < 0 else code}"
