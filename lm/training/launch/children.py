"""Child processes of a command that does not train itself: each has its own session, and every signal reaches each of them once."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import IO, Any, Self

from lm.errors import ResourceError
from lm.training.launch import parent

_POLL_S = 0.1


class Received:
    """Inside the block the signals on which a run ends are only recorded. Outside of the main thread they are left to the program."""

    def __init__(self) -> None:
        self.numbers: list[int] = []  # in the order they came; one that came twice is there once, an impatient second one as AT_ONCE
        self._patience = parent.Patience()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in parent.heard() if parent.may_handle()}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if (asked := self._patience.hear(number)) is not None:
            self.numbers.append(asked)


class Children(Received):
    """Inside the block, which the main thread enters, signals are recorded and forwarded to the children; any thread may run a child.

    The handler only records a signal, and the thread that waits for a child forwards it: so no signal is lost between a child's start and
    the first wait, and none arrives twice, which would end a training unsaved. If an error leaves the block, running children get SIGTERM.
    """

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self.numbers:
            self.numbers.append(signal.SIGTERM)
        super().__exit__(kind, error, trace)

    @property
    def caught(self) -> int | None:
        """The first signal received; None: none so far."""
        return self.numbers[0] if self.numbers else None

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None, output: IO[bytes] | None = None) -> int:
        """Runs a command and returns its exit code; minus the signal's number where a signal ended it, or came before it was started.

        env: added to this process's environment.  output: file for its stdout and stderr; None: this process's.
        """
        if self.numbers:
            return -self.numbers[0]
        told = 0
        child = self._started(command, {**os.environ, **parent.named(), **(env or {})}, output)
        while True:
            try:
                return child.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                for number in self.numbers[told:]:
                    child.send_signal(number)
                    told += 1

    def _started(self, command: Sequence[str], env: Mapping[str, str], output: IO[bytes] | None) -> "subprocess.Popen[bytes]":
        """Starts the child in its own session, so that Ctrl-C reaches it only once, through this process, and it can finish its step."""
        try:
            return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
        except OSError as error:
            reason = f"no process can be started ({error.strerror}). Free memory or processes, and start again"
            raise ResourceError(f"{command[0]}: {reason}.") from error
