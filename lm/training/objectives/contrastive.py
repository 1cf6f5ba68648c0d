"""The loss of texts that belong together (lm/losses/contrastive.py): what a validation measures is minimised."""

from lm.data.rows.contrastive import ContrastiveConfig
from lm.losses.cross_entropy import LossSums
from lm.losses.measure import Measure
from lm.nn.batch import Batch
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.objectives.base import loss_of


class Contrasts:
    """The loss of a config on a batch."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        return self._measure(model, batch)


@loss_of(ContrastiveConfig)
def _contrasts(cfg: ContrastiveConfig, run: TrainConfig) -> Contrasts:
    return Contrasts(cfg.measure(None))
