"""Cross-entropy of the labels: the loss of every objective that registers no other."""

from lm.data.rows.base import LikelihoodConfig, ScheduledSamplingConfig
from lm.losses.measure import answers
from lm.losses.tokens import LossSums, causal_reader
from lm.nn.batch import Batch
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.objectives.base import loss_of
from lm.training.objectives.scheduled_sampling import chances, with_sampled_inputs


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


class ScheduledSampling(Likelihood):
    """Likelihood with a part of the inputs replaced by the model's own samples; the part grows linearly with the steps."""

    def __init__(self, cfg: ScheduledSamplingConfig, max_steps: int, seed: int) -> None:
        super().__init__(cfg)
        self._frac, self._max_steps, self._seed = cfg.scheduled_sampling, max_steps, seed

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        chance = chances(batch, self._seed, step, first_row)
        batch = with_sampled_inputs(model, batch, self._frac * step / self._max_steps, chance, self._cfg.chunk)
        return super().__call__(model, batch, step, first_row)


@loss_of(LikelihoodConfig)
def _likelihood(cfg: LikelihoodConfig, run: TrainConfig) -> Likelihood:
    return Likelihood(cfg)


@loss_of(ScheduledSamplingConfig)
def _scheduled(cfg: ScheduledSamplingConfig, run: TrainConfig) -> Likelihood:
    return ScheduledSampling(cfg, run.trainer.max_steps, run.seeds.dropout) if cfg.scheduled_sampling else Likelihood(cfg)
