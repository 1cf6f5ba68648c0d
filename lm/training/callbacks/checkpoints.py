"""Saves a run, and ends it after its last save."""

import statistics
import time
from dataclasses import asdict
from typing import Any

from lightning import Trainer

from lm import plugins
from lm.schema import Tree
from lm.storage.checkpoint import checkpoints
from lm.training.callbacks.base import RunCallback
from lm.training.callbacks.states import states_of
from lm.training.module import TrainModule


class Checkpoints(RunCallback):
    """Saves weights, optimizer, averages, counters and states of callbacks when due, and at the end of the run, whatever has ended it."""

    def __init__(self, others: bool) -> None:
        """others: there are callbacks that are not built in."""
        self._others = others
        self._save_s: list[float] = []  # how long each save of this process has held up the loop

    def begin(self, module: TrainModule) -> None:
        if module.reader is not None:
            module.run.saved_step = module.step
        cfg = module.cfg
        to_come = -(-(cfg.trainer.max_steps - module.step) // cfg.checkpoint.every)
        most = cfg.checkpoint.most + bool(cfg.numerics.rollbacks)
        more = min(most - len(checkpoints(module.run.folder.checkpoints)), to_come + len(cfg.checkpoint.keep_steps))
        module.run.saver.rehearse(module.pieces(), self._meta(module), max(1, more))

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._agree(pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._agree(pl_module)
        if pl_module.step == 0 and 0 in pl_module.cfg.checkpoint.keep_steps:
            self.save(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._agree(pl_module)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _agree(self, module: TrainModule) -> None:
        """Ranks agree on whether a callback of one of them ends the run: it would save alone, and the others wait for it."""
        if self._others:
            module.trainer.should_stop = bool(*module.run.ranks.most(module.trainer.should_stop))

    def look_at_parent(self, module: TrainModule) -> None:
        if module.run.counters.best_step == module.step:
            self.save(module)

    def step_end(self, module: TrainModule) -> None:
        if module.run.saves(module.step):
            self.save(module)
        if module.run.ends(module.step):
            module.trainer.should_stop = True

    def finish(self, module: TrainModule) -> None:
        self.save(module)

    def save(self, module: TrainModule) -> None:
        """Writes a checkpoint of the current step, unless this step is saved already."""
        run, step, counters = module.run, module.step, module.run.counters
        if step == run.saved_step:
            return
        counters.save_s = statistics.median(self._save_s) if self._save_s else counters.save_s
        counters.train_s += run.clock.passed()  # the steps since the last line of metrics too: the next process may go on behind them
        if run.ranks.first and not run.folder.exists():
            run.journal.console.say(f"{run.folder.path}: it was moved while its run goes on, which writes to a new folder of this name")
            run.folder.write_config(module.cfg.tree())
            run.folder.write_plugins(plugins.files(module.cfg))
        with run.clock.paused(), run.journal.console.during("Saving"):
            begun = time.perf_counter()
            run.saver.save(step, module.pieces(), self._meta(module))
            self._save_s.append(time.perf_counter() - begun)
        run.saved_step = step

    def _meta(self, module: TrainModule) -> Tree:
        run, step = module.run, module.step
        run.counters.skipped_in_a_row = module.verdicts.streak
        run.counters.loss_scale = None if module.loss_scale is None else module.loss_scale.state()
        meta = run.meta | {"step": step, "tokens": run.tokens(step), "counters": asdict(run.counters)}
        states = states_of(module.callbacks)
        return meta | {"callbacks": states} if states else meta
