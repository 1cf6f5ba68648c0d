"""The terminal output of a run: one aligned line per record."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lm.printing import say
from lm.progress import progress
from lm.schema import Tree

_HEADER_EVERY = 20
# key in a training record, title, width, format; a column whose key is absent is left out
_COLUMNS = (
    ("loss", "loss", 9, "{:.4f}"),
    ("accuracy", "accuracy", 10, "{:.1%}"),
    ("margin", "margin", 9, "{:.3f}"),
    ("reward", "reward", 9, "{:.3f}"),
    ("lr", "lr", 10, "{:.2e}"),
    ("grad_norm", "grad norm", 11, "{:.3f}"),
    ("expert_load", "max load", 10, "{:.2f}x"),
    ("tokens_per_second", "tokens/s", 10, "{:,.0f}"),
    ("mfu_pct", "MFU", 7, "{:.1f}%"),
    ("memory_gib", "memory", 10, "{:.2f} GiB"),
)

# the same of what follows the loss of a validation or a test
_HELD_OUT = (
    ("bits_per_byte", "{:.4f} bits/byte"),
    ("pair_loss", "{:.4f} pair loss"),
    ("answer_loss", "{:.4f} answer loss"),
    ("accuracy", "{:.1%} accuracy"),
    ("macro_f1", "{:.3f} macro F1"),
    ("pearson", "{:.3f} Pearson"),
    ("reward", "{:.4f} reward"),
)


class Console:
    """One aligned line per record, coloured on a terminal."""

    def __init__(
        self,
        max_steps: int,
        clock: Callable[[], float] = time.monotonic,
        silent: bool = False,
        read: Callable[[int], int] = int,
    ) -> None:
        """read: returns how much is read in so many steps, which the time goes by; as it is, steps are alike."""
        self.max_steps, self._read = max_steps, read
        self._clock = clock
        self._since: tuple[int, float] | None = None  # step and time of the first record, after compilation and the like
        self._columns: list[str] = []
        self._lines = 0
        self._silent = silent

    def log(self, record: Tree) -> None:
        """Prints a record of training, validation, test or an event; their keys tell these apart. A plugin's own is not shown."""
        if "event" in record:
            rest = "  ".join(f"{key}={value}" for key, value in record.items() if key not in ("step", "event"))
            self._print(f"{self._progress(record)}  {record['event']}  {rest}".rstrip(), "yellow")
        elif "val_loss" in record:
            self._held_out(record, "val_", "validation")
        elif "test_loss" in record:
            self._held_out(record, "test_", "test")
        elif "loss" in record:
            self._training_line(record)

    def say(self, text: str) -> None:
        """Prints a line between the records."""
        self._print(text, "")

    @contextmanager
    def during(self, title: str) -> Iterator[None]:
        """Shows `title` and the elapsed time while the block runs."""
        if self._silent:
            yield
        else:
            with progress(title):
                yield

    def _held_out(self, record: Tree, prefix: str, title: str) -> None:
        shown = "".join(f"  {form.format(record[prefix + key])}" for key, form in _HELD_OUT if record.get(prefix + key) is not None)
        self._print(f"{self._progress(record)}{record[f'{prefix}loss']:9.4f}  {title}{shown}", "green")

    def _training_line(self, record: Tree) -> None:
        cells = [(title, width, form.format(record[key])) for key, title, width, form in _COLUMNS if key in record]
        titles = [title for title, _, _ in cells]
        if titles != self._columns or self._lines % _HEADER_EVERY == 0:
            self._columns, self._lines = titles, 0
            header = "".join(f"{title:>{width}}" for title, width, _ in cells)
            self._print(f"{'step':>8}{'':6}{header}{'ETA':>9}", "bold")
        self._lines += 1
        row = "".join(f"{text:>{width}}" for _, width, text in cells)
        self._print(f"{self._progress(record)}{row}{clock(self._remaining_s(record)):>9}", "")

    def _progress(self, record: Tree) -> str:
        return f"{record['step']:>8,}{record['step'] / self.max_steps:>6.0%}"

    def _remaining_s(self, record: Tree) -> float:
        """Returns the remaining seconds, from the mean pace since the first record, with validations and saves included."""
        step, now, read = record["step"], self._clock(), self._read
        if self._since is None or step <= self._since[0]:
            self._since = (step, now)
            pace = record.get("step_s", math.nan) / (read(step) - read(step - 1))
        else:
            pace = (now - self._since[1]) / (read(step) - read(self._since[0]))
        return float(pace * (read(self.max_steps) - read(step)))

    def _print(self, text: str, style: str) -> None:
        if not self._silent:
            say(text, style)


def clock(seconds: float) -> str:
    """Returns seconds as 45s, 1m23s, 2h05m or 3d04h; ? where unknown."""
    if not math.isfinite(seconds):
        return "?"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h"
    if hours:
        return f"{h}h{m:02}m"
    return f"{m}m{s:02}s" if m else f"{s}s"
