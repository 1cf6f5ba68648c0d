"""How far a long preparation is, on stderr: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

_EVERY_S = 10.0


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yields what takes the bytes done so far."""
    if not _on_terminal():
        yield _Lines(title, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


class _Lines:
    """How much, how fast since the line before, and how long it takes at that speed."""

    def __init__(self, title: str, total: int | None) -> None:
        self._title, self._total = title, total
        self._told = time.monotonic(), 0  # when, and the bytes done then

    def __call__(self, done: int) -> None:
        at, before = self._told
        now = time.monotonic()
        if now - at < _EVERY_S or done <= before:
            return
        self._told = now, done
        speed = (done - before) / max(now - at, 1e-9)
        of = f" of {self._total / 1e6:,.0f}" if self._total else ""
        left = f", {timedelta(seconds=round(max(0, self._total - done) / speed))} left" if self._total else ""
        _tell(f"{self._title}: {done / 1e6:,.0f}{of} MB, {speed / 1e6:,.1f} MB/s{left}")


def _tell(line: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # closed
            print(line, file=sys.stderr, flush=True)


def _on_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False
