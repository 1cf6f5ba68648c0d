"""Ends the run on a signal, after a step that all ranks agree on."""

from lm.training.callbacks.base import RunCallback
from lm.training.module import TrainModule


class StopOnSignal(RunCallback):
    """From the first step on signals are only recorded; they are checked after each step."""

    def begin(self, module: TrainModule) -> None:
        module.run.signals.step = module.step
        module.run.signals.defer()

    def step_end(self, module: TrainModule) -> None:
        module.run.signals.step = module.step
        (number,) = module.run.ranks.most(module.run.signals.received or 0)
        module.run.stopped_by = int(number) or None
