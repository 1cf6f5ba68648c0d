"""Cross-entropy of the labels: the loss of every objective that registers no other."""

from lm.data.rows.base import LikelihoodConfig
from lm.losses.measure import answers
from lm.losses.tokens import LossSums, causal_reader
from lm.nn.batch import Batch
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.objectives.base import loss_of


class Likelihood:
    """Sums -log p(label)."""

    def __init__(self, cfg: LikelihoodConfig) -> None:
        self._cfg = cfg

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        assert batch.labels is not None
        told = answers(batch) if self._cfg.answers else None
        most = batch.most(batch.labels)
        reader = causal_reader(batch.labels, self._cfg.label_smoothing, self._cfg.z_loss, self._cfg.chunk, told, most)
        sums: LossSums = model(batch, read=reader)
        return sums


@loss_of(LikelihoodConfig)
def _likelihood(cfg: LikelihoodConfig, run: TrainConfig) -> Likelihood:
    return Likelihood(cfg)
