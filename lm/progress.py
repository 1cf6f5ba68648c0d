"""How far something is that takes long, on stderr: a line that moves on a terminal; in a file or a pipe, where all lines
stay, one after 10 s, 30 s, 60 s and then each minute."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from lm import printing

_SILENT_S = 2.0  # longest silence on a terminal
_RARELY = (5, 15, 30)  # elsewhere lines come after so many spans of silence, and then every 30

_running: "list[_Progress | None]" = []  # the innermost block is the last, and alone prints; None (`quiet`) prints nothing


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Tells how long the block takes, whenever nothing was printed for a while; yields what takes the bytes done so far, of `total`."""
    told = _Progress(title, total)
    _running.append(told)
    told.start()
    try:
        yield told.done
    finally:
        _running.pop()
        told.stop()


@contextmanager
def quiet() -> Iterator[None]:
    """The block prints by itself, or others do; what is around it tells nothing meanwhile."""
    _running.append(None)
    try:
        yield
    finally:
        _running.pop()


class _Progress(threading.Thread):
    """A thread, since what takes long does not come by to tell."""

    def __init__(self, title: str, total: int | None) -> None:
        super().__init__(name="progress", daemon=True)
        self._title, self._total = title, total
        self._bytes = 0
        self._began = time.monotonic()
        self._told = self._began, 0  # when, and the bytes done then
        self._over = threading.Event()

    def done(self, n_bytes: int) -> None:
        self._bytes = n_bytes

    def stop(self) -> None:
        """No line comes later."""
        self._over.set()
        self.join()

    def run(self) -> None:
        on_terminal, due = printing.moves(), _due(0.0)
        while not self._over.wait(_SILENT_S / 10):
            elapsed = time.monotonic() - self._began
            pause = _SILENT_S / 5 if on_terminal and elapsed >= _SILENT_S else _SILENT_S
            if _running[-1:] == [self] and min(elapsed, printing.silent_s()) >= pause and (on_terminal or elapsed >= due):
                printing.status(self._line())
                due = _due(elapsed)

    def _line(self) -> str:
        """How much, how fast since the line before, and how long it takes at that speed."""
        (at, before), now, done = self._told, time.monotonic(), self._bytes
        if done <= before:  # it reads no more, and works on what it has
            read = f" {done / 1e6:,.0f} MB," if done else ""
            return f"{self._title}:{read} {now - self._began:.0f} s"
        self._told = now, done
        speed = (done - before) / max(now - at, 1e-9)
        of = f" of {self._total / 1e6:,.0f}" if self._total else ""
        left = f", {timedelta(seconds=round(max(0, self._total - done) / speed))} left" if self._total else ""
        return f"{self._title}: {done / 1e6:,.0f}{of} MB, {speed / 1e6:,.1f} MB/s{left}"


def _due(elapsed: float) -> float:
    """Returns after how many seconds a line is due that stays, where one has been told by now."""
    spans = elapsed / _SILENT_S
    return _SILENT_S * next((span for span in _RARELY if span > spans), (spans // _RARELY[-1] + 1) * _RARELY[-1])
