"""Optional loggers beside metrics.jsonl, none of which can hold up a run."""

import importlib.util
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from lm.errors import ConfigError
from lm.schema import Named, Slot, Tree
from lm.storage.run_folder import RunFolder
from lm.training.callbacks.csv_file import Csv
from lm.training.callbacks.tags import grouped
from lm.training.callbacks.wandb_ import Wandb

log = logging.getLogger("lm")


class Logger(Protocol):
    """A further destination for the records of metrics.jsonl and the samples. No method raises, and close takes ten seconds at most.

    go_back: the run goes on from this step, and will repeat the steps since.  close: with the final numbers of the run, as in summary.json;
    with None where it has not reached its end.
    """

    def log(self, record: Tree) -> None: ...

    def samples(self, step: int, texts: Sequence[str]) -> None: ...

    def go_back(self, step: int) -> None: ...

    def close(self, summary: Tree | None) -> None: ...


class LoggerConfig(Slot, group="logger"):
    """Where metrics go beside metrics.jsonl, which is always written."""

    def build(self, folder: Path, config: Tree, step: int) -> list[Logger]:
        """Returns the loggers of a run folder. config: shown as the run's settings.  step: the step from which a resumed run goes on."""
        return []

    def require(self) -> None:
        """Raises ConfigError where a package that the logger needs is not installed."""

    def _require(self, package: str) -> None:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"logger: kind={self.kind} needs the package {package}. Run: pip install 'slotlm[{package}]'")


class JsonlLoggerConfig(LoggerConfig):
    """metrics.jsonl alone, which is always written."""

    kind: Literal["jsonl"] = "jsonl"


class SeveralLoggerConfig(LoggerConfig):
    """Several of them at once: logger=[wandb,tensorboard]."""

    kind: Literal["several"] = "several"
    each: Named[LoggerConfig] = {}
    """The loggers by name; one without `kind` is of the kind that its name says, as in logger.each.wandb.project=mine."""

    def require(self) -> None:
        for one in self.each.values():
            one.require()

    def build(self, folder: Path, config: Tree, step: int) -> list[Logger]:
        return [logger for one in self.each.values() for logger in one.build(folder, config, step)]


class CsvLoggerConfig(LoggerConfig):
    """metrics.jsonl and, at each validation and at the end, the same as metrics.csv with a column for each number."""

    kind: Literal["csv"] = "csv"

    def build(self, folder: Path, config: Tree, step: int) -> list[Logger]:
        return [Csv(RunFolder(folder))]


class TensorBoardLoggerConfig(LoggerConfig):
    """metrics.jsonl and TensorBoard event files in the run folder."""

    kind: Literal["tensorboard"] = "tensorboard"

    def require(self) -> None:
        self._require("tensorboard")

    def build(self, folder: Path, config: Tree, step: int) -> list[Logger]:
        self.require()
        return [TensorBoard(folder, config, step)]


class TensorBoard:
    """Event files under `tensorboard/` of the run folder; steps that a resumed run repeats are purged."""

    def __init__(self, folder: Path, config: Tree, step: int) -> None:
        self._writer: Any = None
        with self._guarded():
            self._writer = self._opened(folder / "tensorboard", step + 1 if step else 0)  # 0: the run begins anew, with a step 0 of its own
            self._writer.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```", step)

    @staticmethod
    def _opened(folder: Path, step: int) -> Any:
        """Returns a writer that purges what the files have of this step and later ones, as of a process that was killed."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder), purge_step=step)

    def log(self, record: Tree) -> None:
        with self._guarded():
            for tag, value in grouped(record).items() if self._writer is not None else ():
                self._writer.add_scalar(tag, value, record["step"])

    def samples(self, step: int, texts: Sequence[str]) -> None:
        with self._guarded():
            if self._writer is not None:  # it renders markdown, where an indented line is shown verbatim
                blocks = ["\n".join(f"    {line}" for line in text.splitlines()) for text in texts]
                self._writer.add_text("samples", "\n\n---\n\n".join(blocks), step)

    def go_back(self, step: int) -> None:
        with self._guarded():
            if self._writer is not None:
                self._writer.close()
                self._writer = self._opened(Path(self._writer.log_dir), step + 1)

    def close(self, summary: Tree | None) -> None:
        with self._guarded():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, it must not end the run
            self._writer = None
            log.warning("tensorboard stopped: %s. The run goes on; metrics.jsonl has everything.", error)


class WandbLoggerConfig(LoggerConfig):
    """metrics.jsonl and Weights & Biases, offline when not logged in."""

    kind: Literal["wandb"] = "wandb"
    project: str | None = None
    """Project name. null: that of WANDB_PROJECT, else lm."""
    entity: str | None = None
    """Team or user. null: the default one."""
    run_group: str | None = None
    """Runs that belong together, such as the seeds of a setting. null: WANDB_RUN_GROUP's."""
    tags: list[str] = []
    """Words to find runs by. []: those of WANDB_TAGS."""
    mode: Literal["online", "offline"] | None = None
    """Whether it is sent at once, or kept in the run folder for `wandb sync`. null: as WANDB_MODE says, else online."""
    notes: str | None = None
    """A remark on the run. null: that of WANDB_NOTES."""

    def require(self) -> None:
        self._require("wandb")

    def build(self, folder: Path, config: Tree, step: int) -> list[Logger]:
        self.require()
        return [Wandb(folder, config, {key: value for key, value in self.tree().items() if key != "kind"})]
