"""Direct preference optimisation. Rafailov et al. 2023, arXiv:2305.18290."""

from collections.abc import Callable

import torch

from lm.data.kinds import DPOConfig
from lm.nn.batch import Batch
from lm.nn.loss import LossSums
from lm.nn.measure import pair_sums, row_likelihoods
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.objectives.base import loss_of
from lm.training.weights.initial import parent


class DPO:
    """`pair_sums` of a batch.

    Rows come in pairs, the better answer first. `parent` gives the frozen model to compare with, whole on every rank.
    """

    def __init__(self, cfg: DPOConfig, parent: Callable[[], LM]) -> None:
        self._cfg, self._parent = cfg, parent
        self._reference: LM | None = None

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        if self._reference is None:
            self._reference = self._parent().to(batch.tokens.device)
        assert batch.labels is not None
        reader = row_likelihoods(batch.labels)
        with torch.no_grad():
            before = self._reference(batch, loss=reader)
        return pair_sums(model(batch, loss=reader), before, self._cfg.beta)


@loss_of(DPOConfig)
def _dpo(cfg: DPOConfig, run: TrainConfig) -> DPO:
    return DPO(cfg, lambda: parent(str(run.init_from)))
