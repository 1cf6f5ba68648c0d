"""The loss of rated answers (lm/losses/kto.py), with one reference point for all rows of a step."""

import torch
from torch import Tensor

from lm.data.rows.rated import KTOConfig
from lm.losses.auxiliary import Auxiliary, with_auxiliary
from lm.losses.cross_entropy import LossSums, mean_of
from lm.losses.likelihoods import row_likelihoods
from lm.losses.measure import Start
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.objectives.base import loss_of
from lm.training.weights.initial import start_of


class KTO:
    """The loss of a config on a batch.

    All rows of a step are compared with one reference point. It is computed before the step's first row is learned from, out of what the
    first micro-batch of each rank carries for all of them (`Batch.beside`); so the loss is the same however a step is split.
    """

    def __init__(self, cfg: KTOConfig, start: Start) -> None:
        self._loss, self._start = cfg.loss(), start
        self._kl = torch.zeros(())  # mean gain of answers to other prompts, in this step

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        assert batch.answers is not None
        if batch.beside:
            self._kl = self._mean_gain(model, batch.beside)
        gain, aux = self._gains(model, batch)
        sums = self._loss(gain, (batch.answers != IGNORED).any(-1), self._kl.clamp(min=0))
        sums.metrics["kl"] = mean_of(self._kl * len(gain), len(gain))
        return aux.beside(sums)

    @torch.no_grad()
    def _mean_gain(self, model: LM, batches: list[Batch]) -> Tensor:
        found = torch.cat([self._gains(model, each)[0] for each in batches])
        total = mean_of(found.sum(), len(found))
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        return total[0] / total[1]

    def _gains(self, model: LM, batch: Batch) -> tuple[Tensor, Auxiliary]:
        """(b,) log(p / p_start) of the labels of each row, and what layers add to the loss."""
        assert batch.labels is not None
        reader = row_likelihoods(batch.labels, n=batch.n_labels(batch.labels))
        before = self._start(model, batch, reader)
        after, aux = model(batch, read=with_auxiliary(reader, 1))
        return after - before, aux


@loss_of(KTOConfig)
def _kto(cfg: KTOConfig, run: TrainConfig) -> KTO:
    return KTO(cfg, start_of(run))
