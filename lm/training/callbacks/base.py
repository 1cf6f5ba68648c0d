"""Base of the built-in callbacks, which act when a run begins, after each optimizer step, and when it ends."""

from typing import Any

from lightning import Callback, Trainer

from lm.training.module import TrainModule


class RunCallback(Callback):
    """Something done between optimizer steps, on every rank. A step of several micro-batches is over when `module.stepped` is True."""

    def begin(self, module: TrainModule) -> None:
        """Called before the first step, once weights and optimizer are initialized or restored. A callback tries here what it will need
        only later (disk space, say), so that a run that would fail later does not begin."""

    def look_at_parent(self, module: TrainModule) -> None:
        """Called after `begin` of all callbacks in a new fine-tuning run, while the weights are still the parent's."""

    def step_end(self, module: TrainModule) -> None:
        """Called after optimizer step `module.step`, unless an earlier callback has rolled that step back."""

    def finish(self, module: TrainModule) -> None:
        """Called after the last step, also where another callback has ended the run."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.begin(pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if pl_module.reader is None and pl_module.cfg.init_from is not None:
            self.look_at_parent(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.stepped:
            self.step_end(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.finish(pl_module)
