"""Ctrl-C and SIGTERM: finish the step, save, exit 130 or 143. A second one within five seconds exits at once."""

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

from lm.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_IMPATIENT_S = 5.0


class Signals:
    """Inside the block a signal raises Interrupted, and after `defer()` it is only noted in `received`."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferred = False
        self._at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.getsignal(number) for number in _SIGNALS}
        self._install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """From now on the loop looks at `received` after each step. Installs the handlers again, since Lightning sets its own."""
        self._deferred = True
        self._install()

    def _install(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and time.monotonic() - self._at < _IMPATIENT_S:
            os._exit(128 + number)
        self.received, self._at = number, time.monotonic()
        if not self._deferred:
            name = signal.Signals(number).name
            raise Interrupted(f"train: {name} came before the first step, so there is nothing new to save. Train again to start.", number)
