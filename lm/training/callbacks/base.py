"""What our callbacks have in common: they act when a run begins, behind each optimizer step, and when it ends."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning import Callback, Trainer

from lm.training.module import TrainModule


class RunCallback(Callback):
    """One thing that happens between steps, on every rank. A step of several micro-batches is over when `module.stepped`."""

    def begin(self, module: TrainModule) -> None:
        """Called before the first step, when weights and optimizer are where they were. What this callback will need only later is tried
        here, so that a run that cannot end well does not begin."""

    def look_at_parent(self, module: TrainModule) -> None:
        """Called once all callbacks have begun a new fine-tuning, whose weights are still its parent's."""

    def step_end(self, module: TrainModule) -> None:
        """Called behind optimizer step `module.step`, unless a callback before this one has undone it."""

    def finish(self, module: TrainModule) -> None:
        """Called behind the last step, also where another callback has ended the run."""

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


def eager(module: TrainModule) -> AbstractContextManager[None]:
    """Returns what keeps a compiled model from being compiled anew for each shape, as where a token follows the other."""
    return torch.compiler.set_stance("force_eager") if module.cfg.trainer.compile else nullcontext()
