"""Cross-entropy of the labels, and of what a teacher says: the loss of every objective that registers no other."""

from torch import Tensor

from lm.data.rows.base import LikelihoodConfig
from lm.generation.teacher import frozen
from lm.losses.cross_entropy import LossSums
from lm.losses.measure import Reference, answers
from lm.losses.teacher import SoftTargets
from lm.losses.tokens import causal_reader
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.head import Head
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.objectives.base import loss_of


class Likelihood:
    """Sums -log p(label), and the divergence from a teacher where there is one."""

    def __init__(self, cfg: LikelihoodConfig, teacher: Reference | None = None) -> None:
        self._cfg, self._teacher = cfg, teacher

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        assert batch.labels is not None
        reader = causal_reader(
            batch.labels,
            label_smoothing=self._cfg.label_smoothing,
            z_loss=self._cfg.z_loss,
            chunk=self._cfg.chunk,
            answers=answers(batch) if self._cfg.answers else None,
            n_labels=batch.n_labels(batch.labels),
            shares=batch.shares,
            teacher=None if self._teacher is None else self._teacher(batch, self._soft_targets),
        )
        sums: LossSums = model(batch, read=reader)
        return sums

    def _soft_targets(self, hidden: Tensor, head: Head, ctx: Context) -> SoftTargets:
        cfg = self._cfg
        return SoftTargets(hidden.flatten(0, -2), head, cfg.teacher_weight, cfg.teacher_temperature, cfg.teacher_beta)


@loss_of(LikelihoodConfig)
def likelihood(cfg: LikelihoodConfig, run: TrainConfig) -> Likelihood:
    path, in_slices = cfg.teacher, run.strategy.slices_weights
    return Likelihood(cfg, None if path is None else Reference(lambda: frozen(path, in_slices)))
