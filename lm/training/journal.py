"""Where a run tells what happens: metrics.jsonl and samples.md in its folder, the terminal, and the loggers that were asked for."""

import re
from collections.abc import Sequence

from lm.schema import Tree
from lm.storage.run_folder import RunFolder
from lm.training.callbacks.console import Console
from lm.training.callbacks.loggers import Logger


class Journal:
    """The records of a run. Every rank may call it; the first one writes."""

    def __init__(self, folder: RunFolder, console: Console, writes: bool) -> None:
        self.folder, self.console, self._writes = folder, console, writes
        self.loggers: list[Logger] = []

    def record(self, record: Tree) -> None:
        """Writes a line of metrics.jsonl, and shows it."""
        if not self._writes:
            return
        self.folder.metrics.append(record)
        self.console.log(record)
        for logger in self.loggers:
            logger.log(record)

    def samples(self, step: int, shown: Sequence[Sequence[str]]) -> int:
        """Writes one block per text, after a heading with the step; returns the length of samples.md then."""
        for logger in self.loggers:
            logger.samples(step, ["\n\n".join(parts) for parts in shown])
        blocks = "".join(f"\n{_fenced(part)}\n" for parts in shown for part in parts)
        return self.folder.samples.append(f"## step {step}\n{blocks}\n") if self._writes else 0

    def go_back(self, step: int, samples_bytes: int) -> None:
        """Drops what was written after a checkpoint, and will be written again."""
        if self._writes:
            self.folder.metrics.truncate(step)
            self.folder.samples.truncate(samples_bytes)

    def close(self) -> None:
        """Ends the loggers."""
        for logger in self.loggers:
            logger.close()


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
