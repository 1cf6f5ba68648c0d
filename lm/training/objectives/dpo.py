"""Direct preference optimisation. Rafailov et al. 2023, arXiv:2305.18290, equation 7."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.data.kinds import DPOConfig
from lm.generation.load import load
from lm.nn.batch import IGNORED, Batch
from lm.nn.context import Context
from lm.nn.head import Head
from lm.nn.loss import LossSums
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.objectives.base import loss_of


class DPO:
    """-log sigmoid(beta * (how much likelier the better answer became than the worse one)), summed over pairs.

    Rows come in pairs, the better answer first. `load` gives the frozen model to compare with, whole on every rank; it is called once.
    """

    def __init__(self, cfg: DPOConfig, load: Callable[[], LM]) -> None:
        self._cfg, self._load = cfg, load
        self._reference: LM | None = None

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        if self._reference is None:
            self._reference = self._load().to(batch.tokens.device).requires_grad_(False)
        assert batch.labels is not None
        reader = row_likelihoods(batch.labels)
        with torch.no_grad():
            before: Tensor = self._reference(batch, loss=reader)
        total = -F.logsigmoid(self._cfg.beta * margins(model(batch, loss=reader) - before)).sum()
        return LossSums(total, total.detach())


@loss_of(DPOConfig)
def _dpo(cfg: DPOConfig, run: TrainConfig) -> DPO:
    return DPO(cfg, lambda: load(str(run.init_from), "cpu")[0])


def margins(gain: Tensor) -> Tensor:
    """(pairs,) by how much more the better answer became likelier.  gain: (2 pairs,) log-likelihoods less those at the start."""
    return gain[0::2] - gain[1::2]


def row_likelihoods(labels: Tensor) -> Callable[[Tensor, Head, Context], Tensor]:
    """A reader: (b,) the log-likelihood of the labels of each row."""

    def read(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        row, place = torch.nonzero(labels != IGNORED, as_tuple=True)
        logits = head(hidden[row, place]).float()  # (labels, v)
        likelihoods = -F.cross_entropy(logits, labels[row, place], reduction="none")
        return likelihoods.new_zeros(len(labels)).index_add(0, row, likelihoods)

    return read
