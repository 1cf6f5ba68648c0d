"""Losses of numbers that are told of texts (lm/losses/targets.py): what a validation measures is minimised."""

from lm.data.rows.targets import TargetConfig
from lm.losses.cross_entropy import LossSums
from lm.losses.targets import TargetLoss
from lm.nn.batch import Batch
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.objectives.base import loss_of


class Targets:
    """The loss of a config on a batch."""

    def __init__(self, loss: TargetLoss) -> None:
        self._loss = loss

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        sums: LossSums = model(batch, read=self._loss.reader(batch))
        return sums


@loss_of(TargetConfig)
def _targets(cfg: TargetConfig, run: TrainConfig) -> Targets:
    return Targets(cfg.loss())
