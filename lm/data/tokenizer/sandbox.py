"""Chat templates are programs that come with a model: they run in jinja's sandbox, in a process that may take little memory and time."""

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from lm.data.tokenizer import rendering
from lm.errors import ConfigError

_MAX_SOURCE = 1 << 16  # characters

Messages = Sequence[dict[str, str]]


def compiled(source: str, where: str) -> Callable[[Messages, dict[str, Any]], str]:
    """The template as a function of messages and further names. Raises ConfigError, then and when it runs.

    `{% generation %}` blocks come out between OPEN and CLOSE.
    """
    if len(source) > _MAX_SOURCE:
        raise ConfigError(f"{where}: a chat template of {len(source):,} characters is over {_MAX_SOURCE:,}. Use a shorter one.")
    process = _Process(source)
    if process.error is not None:
        raise ConfigError(f"{where}: the chat template cannot be read ({process.error}). Mend it.")

    def render(messages: Messages, names: dict[str, Any]) -> str:
        answer = process.ask({"messages": messages, **names})
        if "error" in answer:
            raise ConfigError(f"{where}: the chat template fails ({answer['error']}). Mend it, or the messages.")
        return str(answer["result"])

    return render


class _Process:
    """One that renders this template, over two pipes. It ends with this object, or with the process that this object is in."""

    def __init__(self, source: str) -> None:
        command = [sys.executable, "-P", rendering.__file__]  # -P: beside that file lie modules with common names
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        weakref.finalize(self, _end, self._process)
        self.error: str | None = self.ask(source).get("error")

    def ask(self, question: Any) -> dict[str, Any]:
        """The result, or the error."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        answer: dict[str, Any] = json.loads(line) if line else {"error": _why(process.wait())}
        return answer


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def _why(code: int) -> str:
    """What ended the process."""
    if code == -signal.SIGPROF:
        return "it takes more than a second"
    return f"its process ended with {signal.Signals(-code).name if code < 0 else code}"
