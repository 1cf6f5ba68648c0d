"""Updates the averaged weights after each step, where trainer.ema_decay is set."""

from lm.training.callbacks.base import RunCallback
from lm.training.module import TrainModule
from lm.training.weights.ema import EMA
from lm.training.weights.initial import load_pieces


class Averages(RunCallback):
    """Keeps `module.ema`."""

    def begin(self, module: TrainModule) -> None:
        decay = module.cfg.trainer.ema_decay
        if decay is None:
            return
        module.ema = EMA(module.strategy, module.model, module.weights(), decay)
        if module.reader is not None:
            load_pieces(module.ema.pieces(), module.reader)

    def step_end(self, module: TrainModule) -> None:
        if module.ema is not None:
            module.ema.update()
