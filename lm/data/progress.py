"""How far a long preparation is: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lm.data.cache import Log

_EVERY_S = 5.0


@contextmanager
def progress(title: str, total: int | None, log: Log) -> Iterator[Callable[[int], None]]:
    """Yields what takes the bytes done so far. The bar goes to stderr, lines to `log`."""
    if not _on_terminal():
        yield _Lines(title, total, log)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


class _Lines:
    def __init__(self, title: str, total: int | None, log: Log) -> None:
        self._title, self._total, self._log = title, total, log
        self._told_at = time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._told_at < _EVERY_S:
            return
        self._told_at = time.monotonic()
        of = f" of {self._total / 1e6:,.0f}" if self._total else ""
        self._log(f"{self._title}: {done / 1e6:,.0f}{of} MB")


def _on_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False
