"""The state that the callbacks of one run share: its data and folder, its progress, and whether it ends."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from pydantic import Field

from lm.data.rows.build import Splits
from lm.data.store.prepare import Prepared
from lm.errors import CheckpointError, ConfigError
from lm.generation.evaluate import EvalRanks
from lm.nn.batch import AskedAs
from lm.schema import Config, Tree
from lm.storage.checkpoint import META, CheckpointReader, checkpoints, step_folder
from lm.storage.reading import checked
from lm.storage.run_folder import RunFolder
from lm.training.callbacks.saving import Saver
from lm.training.config import TrainConfig
from lm.training.journal import Journal
from lm.training.launch.ranks import GroupedRanks, Ranks
from lm.training.launch.signals import Signals
from lm.training.trainer_config import TrainerConfig
from lm.units import counted


@dataclass
class Counters:
    """The counters that a checkpoint carries beside weights and optimizer."""

    best: float | None = None  # the least that `ObjectiveConfig.judged` has said of a validation
    best_val_loss: float | None = None  # of that validation
    best_bits_per_byte: float | None = None
    best_step: int | None = None  # with checkpoint.best
    worse_validations: int = 0
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    test: dict[str, float] = field(default_factory=dict)  # metrics of the test after the last step
    save_s: float | None = None  # median seconds that a save has held up the loop, without this checkpoint's own
    train_s: float = 0.0  # seconds spent stepping, over all resumes
    samples_bytes: int = 0  # length of samples.md
    recent_losses: list[float] = field(default_factory=list)  # what the next logged loss is compared with
    dead_steps: list[int] = field(default_factory=list)  # logged steps in a row without any gradient: the first few, and the last
    skipped: int = 0  # steps left out because they were not finite
    skipped_in_a_row: int = 0  # the last of these, up to this step
    rolled_back: int = 0  # number of rollbacks
    loss_scale: tuple[float, int] | None = None  # of LossScale.state
    max_steps: int | None = None  # length that trainer.max_minutes has come to, once decided
    rows_from: int = 0  # step n reads the rows of step n + rows_from, since rollbacks left rows out
    device: str = ""  # what the steps run on

    def length(self, trainer: TrainerConfig) -> int:
        """Returns the run's length in steps: what trainer.max_minutes has come to, else trainer.max_steps."""
        return self.max_steps or trainer.max_steps

    def done(self, step: int, trainer: TrainerConfig) -> bool:
        """Says whether the run is complete after this step: at its last one, or stopped early."""
        stopped_early = trainer.early_stop is not None and self.worse_validations >= trainer.early_stop
        return stopped_early or step >= self.length(trainer)


class Saved(Config):
    """What the meta data of a run's checkpoint say."""

    format: int
    model: Tree
    config: Tree
    fingerprint: str
    files: dict[str, str]
    tokenizer_hash: str
    parent: str | None
    parent_hash: str | None
    teacher_hash: str | None = None
    family: str | None = None
    sampling: Tree | None = None
    card: Tree | None = None
    prompts: dict[str, str] | None = None
    asked_as: AskedAs | None = None
    version: str
    plugins: dict[str, str]
    adapter: Tree | None = None
    callbacks: dict[str, Tree] = {}
    step: int = Field(ge=0)
    tokens: int = Field(ge=0)
    counters: Counters

    @classmethod
    def of(cls, reader: CheckpointReader) -> Self:
        """Returns a checkpoint's metadata. Raises CheckpointError where a key is missing or has another type, or the step is not the one in
        the folder's name."""
        found = checked(cls, reader.meta, reader.folder / META)
        if reader.folder.name != step_folder(reader.folder.parent, found.step).name:
            raise CheckpointError(f"{reader.folder / META}: it is of step {found.step}, and its folder of another. Use another checkpoint.")
        return found

    def require_patience(self, trainer: TrainerConfig) -> None:
        """Raises ConfigError where trainer.early_stop is new, or lower, and would end the run where it stands, without a last test."""
        before = trainer.replace(early_stop=self.config.get("trainer", {}).get("early_stop"))
        if self.counters.done(self.step, trainer) and not self.counters.done(self.step, before):
            worse = self.counters.worse_validations
            what = f"{counted(worse, 'validation')} in a row brought nothing better, so that the run would end where it stands"
            raise ConfigError(f"trainer.early_stop={trainer.early_stop}: {what}. Set it to {worse + 1} or more, or leave it as it was.")


class Clock:
    """Measures the time that steps take; what happens between them is left out."""

    def __init__(self) -> None:
        self.steps = 0  # of the last lap
        self.step_s = 0.0  # mean seconds of a step in the last lap
        self.spent: Mapping[str, float] = {}  # those of them that went by for something, by name
        self._spent: Mapping[str, float] = {}  # by the end of that lap
        self.start(0)

    def start(self, step: int) -> None:
        """Starts a lap now, after this many steps."""
        self._step, self._at, self._told = step, time.perf_counter(), 0.0

    def lap(self, step: int, spent: Mapping[str, float]) -> float:
        """Returns the seconds since the last lap, without those that `passed` has told.  spent: of all laps so far, those that went by for
        something, by name."""
        now = time.perf_counter()
        seconds, steps, told = now - self._at, max(1, step - self._step), self._told
        self.steps, self.step_s = steps, seconds / steps
        self.spent = {name: (total - self._spent.get(name, 0.0)) / steps for name, total in spent.items()}
        self._step, self._at, self._spent, self._told = step, now, dict(spent), 0.0
        return seconds - told

    def passed(self) -> float:
        """Returns the seconds of the lap so far, without those that it has told before."""
        found = self.untold()
        self._told += found
        return found

    def elapsed(self) -> float:
        """Returns the seconds of the lap so far."""
        return time.perf_counter() - self._at

    def untold(self) -> float:
        """Returns what `passed` would."""
        return self.elapsed() - self._told

    def under_way(self, step: int) -> tuple[int, float] | None:
        """Returns the steps of the lap so far, and their seconds; None where it has none."""
        return (step - self._step, self.elapsed()) if step > self._step else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time spent in the block."""
        begun = time.perf_counter()
        yield
        self._at += time.perf_counter() - begun


@dataclass
class RunState:
    """One run in this process. A TrainModule carries it as `run`; callbacks read it, and each writes its own fields."""

    cfg: TrainConfig
    ranks: Ranks
    signals: Signals
    journal: Journal
    data: Prepared
    splits: Splits
    meta: Tree  # what every checkpoint repeats: config, model, fingerprint, tokenizer hash, parent
    counters: Counters
    saver: Saver = field(init=False)
    clock: Clock = field(init=False, default_factory=Clock)
    logged: Tree = field(init=False, default_factory=dict)  # the newest line of metrics
    saved_step: int = field(init=False, default=-1)  # of the newest checkpoint
    stopped_by: int | None = field(init=False, default=None)  # the signal that ends the run, the same on all ranks

    def __post_init__(self) -> None:
        cfg, ranks = self.cfg, self.ranks
        if cfg.checkpoint.background:  # the loop's messages and the writer's must not mix
            ranks = ranks.apart(cfg.launch.timeout_s)
        self.saver = Saver(self.folder.checkpoints, cfg.checkpoint, ranks, self.data.tokenizer.save, cfg.numerics.rollbacks > 0)
        self.journal.console.max_steps = self.max_steps

    @property
    def max_steps(self) -> int:
        """Returns the run's length in steps."""
        return self.counters.length(self.cfg.trainer)

    def shorten(self, max_steps: int) -> None:
        """Decides the run's length in place of trainer.max_minutes."""
        self.counters.max_steps = self.journal.console.max_steps = max_steps

    @property
    def folder(self) -> RunFolder:
        return self.journal.folder

    @property
    def eval_ranks(self) -> EvalRanks:
        """Returns the ranks that share an evaluation; ranks with slices of the same matrices count as one."""
        n = self.cfg.launch.tensor
        return self.ranks if n == 1 else GroupedRanks(self.ranks, n)

    def logs(self, step: int) -> bool:
        """Says whether a line of metrics is written after this step."""
        return step % self.cfg.trainer.log_every == 0 or step == 1 or self.last(step)

    def validates(self, step: int) -> bool:
        """Says whether a validation follows this step."""
        return step % self.cfg.trainer.val_every == 0 or self.last(step)

    def saves(self, step: int) -> bool:
        """Says whether a checkpoint is saved after this step."""
        where = self.cfg.checkpoint
        return step % where.every == 0 or step in where.keep_steps or step == self.counters.best_step or self.ends(step)

    def last(self, step: int) -> bool:
        """Says whether this is the run's last step, unless it stops early."""
        return step >= self.max_steps

    def done(self, step: int) -> bool:
        """Says whether the run is complete: at its last step, or stopped early."""
        return self.counters.done(step, self.cfg.trainer)

    def ends(self, step: int) -> bool:
        """Says whether this process ends after this step: the run is done, or a signal has come."""
        return self.stopped_by is not None or self.done(step)

    def tokens(self, step: int) -> int:
        """Returns the number of tokens read in the first `step` steps."""
        return self.cfg.tokens(step)

    def rows_of(self, step: int) -> list[int]:
        """Returns the row ids of a step, counted from 0."""
        data, train = self.cfg.data, self.splits.train
        places = data.sizes.places((step + self.counters.rows_from) // train.updates)
        return list(train.at(self.cfg.seeds.data, places, data.train_rows).tolist())

    def consumed(self, step: int) -> Tree:
        """Returns how much of each source of a mixture the first `step` steps have read, as metrics."""
        data, train = self.cfg.data, self.splits.train
        rows = data.sizes.before(-(-(step + self.counters.rows_from) // train.updates))
        return dict(train.consumed(rows, self.cfg.objective.texts * data.seq_len))

    def last_checkpoint(self) -> str:
        """Returns the part of an error message that names the last checkpoint."""
        kept = checkpoints(self.folder.checkpoints)
        return f"{kept[0]} is the last checkpoint" if kept else "there is no checkpoint yet"
