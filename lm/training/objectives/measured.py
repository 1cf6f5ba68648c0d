"""Losses that are what a validation measures: of texts that belong together (lm/losses/contrastive.py), and of numbers that are told of
texts (lm/losses/targets.py)."""

from lm.data.rows.contrastive import ContrastiveConfig
from lm.data.rows.targets import TargetConfig
from lm.losses.cross_entropy import LossSums
from lm.losses.measure import Measure
from lm.nn.batch import Batch
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.objectives.base import loss_of


class Measured:
    """The loss of a config on a batch."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        return self._measure(model, batch)


@loss_of(ContrastiveConfig)
@loss_of(TargetConfig)
def _measured(cfg: ContrastiveConfig | TargetConfig, run: TrainConfig) -> Measured:
    return Measured(cfg.measure(None))
