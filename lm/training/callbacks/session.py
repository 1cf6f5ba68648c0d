"""What happens between steps: metrics, validation, samples, checkpoints, and the decision to stop."""

import math
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lm.config import Tree
from lm.data.layout.mixed import consumed, step_ids
from lm.data.rows.base import Rows
from lm.errors import NumericsError
from lm.nn.cost.count import Counts
from lm.nn.transformer import LM
from lm.storage.atomic import require_space
from lm.storage.checkpoint import CheckpointReader, Piece, bytes_of, checkpoints, newest_valid
from lm.training.callbacks.console import Console
from lm.training.callbacks.loggers import Logger
from lm.training.callbacks.metrics import MetricsFile, expert_loads, memory_gib, peak_flops
from lm.training.callbacks.numerics import is_spike
from lm.training.callbacks.samples import append_samples, truncate_samples
from lm.training.callbacks.saving import Saver
from lm.training.callbacks.signals import Signals
from lm.training.callbacks.validation import Validation
from lm.training.config import TrainConfig
from lm.training.counters import Counters
from lm.training.launch.ranks import Ranks
from lm.training.resume import has_stopped_early
from lm.training.state import EMA, load_pieces

if TYPE_CHECKING:  # Lightning takes seconds, and a run that is finished does not need it
    from lm.training.module import TrainModule


@dataclass
class Session:
    """One run from its first to its last step in this process. `after_step` is called by the module, on every rank."""

    cfg: TrainConfig
    folder: Path
    model: LM
    rows: Rows
    validation: Validation
    counts: Counts
    console: Console
    loggers: list[Logger]
    metrics: MetricsFile
    signals: Signals
    meta: Tree  # what every checkpoint repeats: config, model, fingerprint, tokenizer hash, parent
    counters: Counters
    ranks: Ranks
    saver: Saver
    reader: CheckpointReader | None  # of the checkpoint that the run goes on from
    ema: EMA | None = None
    last_saved: int = -1
    stopped_by: int | None = None  # the signal that ends the run, the same on all ranks
    save_s: list[float] = field(default_factory=list)  # how long each save of this process has held up the loop
    _bad_told: int = 0  # steps that were not finite, in this process
    _mark: tuple[int, float] = (0, 0.0)  # step and time of the last metrics line, pauses taken out

    def attach(self, module: "TrainModule") -> None:
        """The module whose steps this session follows."""
        self.module = module

    @property
    def done(self) -> bool:
        """At the last step, or stopped early."""
        return self.module.step >= self.cfg.trainer.max_steps or has_stopped_early(self.cfg, self.counters.worse_validations)

    def start(self) -> None:
        """Training begins now: weights and optimizer are where they were, signals wait for the end of a step, and the clock starts."""
        if self.reader is not None:
            self._restore(self.reader)
        elif self.cfg.trainer.ema_decay is not None:
            self.ema = self._average(self.cfg.trainer.ema_decay)
        self._require_space()
        cuda = self.module.device.type == "cuda"
        self.counters.device = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
        if self.cfg.trainer.sample_prompts and self.model.cfg.kind == "encoder":
            self.console.say("trainer.sample_prompts are left aside: an encoder continues no text")
        self.signals.defer()
        if self.reader is None and self.cfg.init_from is not None:
            self._validate(0)  # what the fine-tuning is to better
        self._mark = (self.module.step, time.perf_counter())

    def _restore(self, reader: CheckpointReader) -> None:
        strategy = self.module.strategy
        load_pieces(strategy.weights(self.model), reader)
        strategy.refresh(self.model)
        if not self.cfg.resume.fresh_optimizer:
            load_pieces(strategy.optimizer(self.model, self.module.trainer.optimizers[0]), reader)
        if self.cfg.trainer.ema_decay is not None:
            self.ema = self._average(self.cfg.trainer.ema_decay)
            load_pieces(self.ema.pieces(), reader)
        self.last_saved = int(reader.meta["step"])

    def _average(self, decay: float) -> EMA:
        strategy = self.module.strategy
        return EMA(strategy.weights(self.model), decay, lambda: strategy.refresh(self.model))

    def after_step(self) -> bool:
        """True where training should end."""
        step, cfg = self.module.step, self.cfg.trainer
        last = step >= cfg.max_steps
        if self.ema is not None:
            self.ema.update()
        logs = step % cfg.log_every == 0 or last or step == 1
        validates = step % cfg.val_every == 0 or last
        (number,) = self.ranks.most(self.signals.received or 0)
        self.stopped_by = int(number) or None
        stop = last or self.stopped_by is not None
        saves = step % self.cfg.checkpoint.every == 0 or stop
        if logs or validates or saves or self.module.device.type == "cpu":  # waits for the device
            self._tell_bad_steps()
        if logs and self._log_step(step) and self._roll_back(step):
            return False
        with self._pause():
            if validates:
                self._validate(step)
            if saves or self.done:
                self.save()
        return stop or self.done

    def _tell_bad_steps(self) -> None:
        """Names the rows of steps that were left out; NumericsError where too many follow each other."""
        verdicts = self.module.verdicts
        bad, stuck = verdicts.bad_steps(self._bad_told), bool(verdicts.stuck)
        for step in bad:
            event = "not finite" if stuck and step == bad[-1] else "skipped"
            self._record({"step": step + 1, "event": event, "rows": self._rows_of(step)})
        self._bad_told = int(verdicts.n_bad)
        self.counters.skipped += len(bad)
        if stuck:
            raise NumericsError(
                f"train: step {bad[-1] + 1} has loss {float(verdicts.loss):.4g} over {float(verdicts.labels):.0f} labels and gradient norm"
                f" {float(verdicts.norm):.4g}, and only finite steps are taken; the weights are as before it, and {self._last_checkpoint()}"
                f". Lower optim.lr={self.cfg.optim.lr:g} or optim.clip, set numerics.skip_in_a_row, or look at the rows of that step, which"
                f" {self.folder / 'metrics.jsonl'} names."
            )

    def _rows_of(self, step: int) -> list[int]:
        """Row ids of a step, counted from 0."""
        rows: list[int] = step_ids(self.rows, self.cfg.seed, step + self.counters.rows_from, self.cfg.data.global_batch).tolist()
        return rows

    def _roll_back(self, step: int) -> bool:
        """To the last checkpoint, and on with the rows that come next; False where that is not wanted or there is none."""
        self.saver.wait()
        folder, before = self.folder / "checkpoints", self.counters
        wanted = before.rolled_back < self.cfg.numerics.rollbacks
        path = self.ranks.from_first(lambda: newest_valid(folder)[0]) if wanted else None
        if path is None:
            return False
        reader = CheckpointReader(path, verified=True)
        self._restore(reader)
        at = int(reader.meta["step"])
        rows_from = before.rows_from + step - at
        self.counters = Counters(**reader.meta["counters"] | {"rolled_back": before.rolled_back + 1, "rows_from": rows_from})
        self.module.step, self._mark, self.last_saved = at, (at, time.perf_counter()), -1
        if self.ranks.first:
            self.metrics.truncate(at)
            truncate_samples(self.folder / "samples.md", self.counters.samples_bytes)
        self._record({"step": at, "event": "rolled back", "from_step": step, "rows_left_out": (step - at) * self.cfg.data.global_batch})
        return True

    def _last_checkpoint(self) -> str:
        kept = checkpoints(self.folder / "checkpoints")
        return f"{kept[0]} is the last checkpoint" if kept else "there is no checkpoint yet"

    def _require_space(self) -> None:
        """For the checkpoints to be kept and one more, as far as they are not there yet."""
        (size,) = self.ranks.total(bytes_of(piece.part(self.ranks.rank, self.ranks.world) for piece in self._pieces()))
        every, kept = self.cfg.checkpoint.every, checkpoints(self.folder / "checkpoints")
        to_come = -(-(self.cfg.trainer.max_steps - self.module.step) // every)
        more = min(self.cfg.checkpoint.keep_last + 1 - len(kept), to_come)
        require_space(self.folder / "checkpoints", int(size) * max(1, more))

    def _log_step(self, step: int) -> bool:
        """True where the loss stands out."""
        since, at = self._mark
        loss, norm = float(self.module.loss()), float(self.module.grad_norm)  # waits for the device
        now = time.perf_counter()
        self._mark = (step, now)
        self.counters.train_s += now - at
        step_s = (now - at) / max(1, step - since)
        rate = self.cfg.data.global_batch * self.cfg.data.seq_len / step_s
        record: Tree = {"step": step, "tokens": self._tokens(step), "loss": loss, "lr": self._lr(), "grad_norm": norm}
        (memory,) = self.ranks.most(memory_gib(self.module.device))
        record |= {"tokens_per_second": round(rate, 1), "step_s": round(step_s, 5), "memory_gib": round(memory, 3)}
        peak = peak_flops(torch.cuda.get_device_name()) if self.module.device.type == "cuda" else None
        if peak is not None:
            record["mfu_pct"] = round(100 * rate * self.counts.train_flops_per_token / peak, 2)
        record |= consumed(self.rows, step + self.counters.rows_from, self.cfg.data)
        loads = self.module.loads
        self._record(record | (expert_loads(loads, self.model.mixtures()) if loads is not None else {}))
        factor = self.cfg.numerics.spike_factor
        spike = math.isfinite(loss) and is_spike(loss, self.counters.recent_losses, factor)
        if spike:
            self._record({"step": step, "event": "loss spike", "loss": loss, "rows": self._rows_of(step - 1)})
        return spike

    def _lr(self) -> float:
        group: Tree = self.module.trainer.optimizers[0].param_groups[-1]
        return float(group["lr"])

    def _tokens(self, step: int) -> int:
        return step * self.cfg.data.global_batch * self.cfg.data.seq_len

    def _record(self, record: Tree) -> None:
        if not self.ranks.first:
            return
        self.metrics.append(record)
        self.console.log(record)
        for logger in self.loggers:
            logger.log(record)

    def _validate(self, step: int) -> None:
        with self._exported_weights():
            found, samples = self.validation.losses(), self.validation.samples()
        p = self.counters
        if samples and self.ranks.first:
            p.samples_bytes = append_samples(self.folder / "samples.md", step, samples)
        p.val_loss, p.val_bits_per_byte = found["val_loss"], found["val_bits_per_byte"]
        if not math.isfinite(p.val_loss):
            raise NumericsError(
                f"train: val_loss is {p.val_loss} after step {step}, and the weights are not saved; {self._last_checkpoint()}. Lower"
                f" optim.lr={self.cfg.optim.lr:g}, or use trainer.precision=fp32."
            )
        better = p.best_val_loss is None or p.val_loss < p.best_val_loss
        p.best_val_loss, p.worse_validations = (p.val_loss, 0) if better else (p.best_val_loss, p.worse_validations + 1)
        self._record({"step": step, "tokens": self._tokens(step), **found})
        if self.done and step < self.cfg.trainer.max_steps:
            self._record({"step": step, "event": "stopped early", "validations_without_improvement": p.worse_validations})

    @contextmanager
    def _exported_weights(self) -> Iterator[None]:
        """The weights that are validated and handed on: the averaged ones where there are some."""
        precision = self.module.trainer.precision_plugin
        averaged: AbstractContextManager[None] = self.ema.swapped() if self.ema is not None else nullcontext()
        with averaged, precision.forward_context():
            yield

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Time in here is not counted as training."""
        begun = time.perf_counter()
        yield
        step, at = self._mark
        self._mark = (step, at + time.perf_counter() - begun)

    def save(self) -> None:
        """A checkpoint of the current step, unless this step is saved already."""
        step = self.module.step
        if step == self.last_saved:
            return
        self.counters.save_s = statistics.median(self.save_s) if self.save_s else self.counters.save_s
        meta = self.meta | {"step": step, "tokens": self._tokens(step), "counters": asdict(self.counters)}
        begun = time.perf_counter()
        self.saver.save(step, self._pieces(), meta)
        self.save_s.append(time.perf_counter() - begun)
        self.last_saved = step

    def _pieces(self) -> Iterator[Piece]:
        strategy = self.module.strategy
        yield from strategy.weights(self.model)
        yield from strategy.optimizer(self.model, self.module.trainer.optimizers[0])
        if self.ema is not None:
            yield from self.ema.pieces()
