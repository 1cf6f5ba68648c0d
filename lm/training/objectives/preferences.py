"""Losses over pairs of answers: DPO, IPO, APO, SimPO and ORPO (lm/losses/pairs.py), and that of a reward model (lm/losses/rewards.py)."""

from lm.data.rows.preference import PreferenceConfig
from lm.data.rows.reward import RewardModelConfig
from lm.losses.auxiliary import with_auxiliary
from lm.losses.cross_entropy import LossSums
from lm.losses.likelihoods import row_likelihoods, row_scores
from lm.losses.measure import Start
from lm.losses.rewards import bradley_terry
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.objectives.base import loss_of
from lm.training.weights.initial import start_of


class Preferences:
    """The loss of a config on a batch.

    Rows come in pairs, the preferred answer first.
    """

    def __init__(self, cfg: PreferenceConfig, start: Start) -> None:
        self._loss, self._start = cfg.loss(), start

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        assert batch.labels is not None
        reader = row_likelihoods(batch.labels, n=batch.n_labels(batch.labels))
        before = self._start(model, batch, reader) if self._loss.needs_start else None
        after, aux = model(batch, read=with_auxiliary(reader, 1 / 2))
        return aux.beside(self._loss(after, before, (batch.labels != IGNORED).sum(-1)))


@loss_of(PreferenceConfig)
def _preferences(cfg: PreferenceConfig, run: TrainConfig) -> Preferences:
    return Preferences(cfg, start_of(run))


class RewardModel:
    """The loss of a reward model on a batch.  Rows come in pairs, the preferred answer first."""

    def __init__(self, cfg: RewardModelConfig) -> None:
        self._centre = cfg.centre

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        assert batch.labels is not None
        rewards, aux = model(batch, read=with_auxiliary(row_scores(batch.labels), 1 / 2))
        return aux.beside(bradley_terry(rewards, self._centre))


@loss_of(RewardModelConfig)
def _reward_model(cfg: RewardModelConfig, run: TrainConfig) -> RewardModel:
    return RewardModel(cfg)
