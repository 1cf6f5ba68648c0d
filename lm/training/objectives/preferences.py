"""Losses over pairs of answers: DPO, SimPO and ORPO (lm/losses/pairs.py)."""

from collections.abc import Callable

import torch

from lm.data.rows.preference import PreferenceConfig
from lm.losses.measure import row_likelihoods
from lm.losses.tokens import LossSums
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.objectives.base import loss_of
from lm.training.weights.initial import parent


class Preferences:
    """The loss of a config on a batch.

    Rows come in pairs, the preferred answer first. `parent` returns the frozen reference model, unsharded on every rank.
    """

    def __init__(self, cfg: PreferenceConfig, parent: Callable[[], LM]) -> None:
        self._loss, self._parent = cfg.loss(), parent
        self._reference: LM | None = None

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        assert batch.labels is not None
        reader, before = row_likelihoods(batch.labels), None
        if self._loss.needs_start:
            if self._reference is None:
                self._reference = self._parent().to(batch.tokens.device)
            with torch.no_grad():
                before = self._reference(batch, read=reader)
        return self._loss(model(batch, read=reader), before, (batch.labels != IGNORED).sum(-1))


@loss_of(PreferenceConfig)
def _preferences(cfg: PreferenceConfig, run: TrainConfig) -> Preferences:
    return Preferences(cfg, lambda: parent(str(run.init_from), run.adapter))
