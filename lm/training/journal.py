"""Where a run records its progress: metrics.jsonl and samples.md in its folder, the terminal, and the loggers of the config."""

import re
from collections.abc import Sequence

from lm.errors import ConfigError
from lm.schema import Tree
from lm.storage.run_folder import RunFolder
from lm.training.callbacks.console import Console
from lm.training.callbacks.loggers import Logger


class Journal:
    """The records of a run. Every rank may call it; only the first rank writes."""

    def __init__(self, folder: RunFolder, console: Console, writes: bool) -> None:
        self.folder, self.console, self._writes = folder, console, writes
        self.loggers: list[Logger] = []

    def record(self, record: Tree) -> None:
        """Appends a record to metrics.jsonl, and sends it to the terminal and the loggers. Raises ConfigError for one without a step,
        behind which the file could not be read."""
        if type(record.get("step")) is not int:
            raise ConfigError(f"record: {repr(record)[:80]} has no whole number as its step. Write {{'step': module.step, ...}}.")
        if not self._writes:
            return
        self.folder.metrics.append(record)
        self.console.log(record)
        for logger in self.loggers:
            logger.log(record)

    def samples(self, step: int, shown: Sequence[Sequence[str]]) -> int:
        """Appends to samples.md a heading with the step and one block per text; returns the file's new length in bytes."""
        for logger in self.loggers:
            logger.samples(step, ["\n\n".join(parts) for parts in shown])
        blocks = "".join(f"\n{_fenced(part)}\n" for parts in shown for part in parts)
        return self.folder.samples.append(f"## step {step}\n{blocks}\n") if self._writes else 0

    def go_back(self, step: int, samples_bytes: int, rollbacks: int) -> None:
        """Drops records and samples written after a checkpoint, since the resumed run writes them again.

        rollbacks: how many were made before this; that of a killed run which has saved nothing since is made again.
        """
        if self._writes:
            self.folder.metrics.truncate(step, rollbacks)
            self.folder.samples.truncate(samples_bytes)
        for logger in self.loggers:
            logger.go_back(step)

    def close(self, summary: Tree | None) -> None:
        """Ends the loggers.  summary: the final numbers; None where the run has not reached its end."""
        for logger in self.loggers:
            logger.close(summary)


def _fenced(text: str) -> str:
    """Returns the text as a code block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
