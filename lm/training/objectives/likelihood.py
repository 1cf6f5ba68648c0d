"""What a training step makes of a model and a batch (lm/nn/loss.py does the sums)."""

from collections.abc import Callable
from typing import Protocol

from lm.data.kinds import DPOConfig, ObjectiveConfig
from lm.data.rows.base import LikelihoodConfig, ScheduledSamplingConfig
from lm.nn.batch import Batch
from lm.nn.loss import LossSums, causal_reader
from lm.nn.transformer import LM


class Objective(Protocol):
    """The loss of one micro-batch, as sums over what its `step_tokens` count."""

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        """step: optimizer steps taken before.  first_row: the number of the batch's first row among all rows of the step."""


class Likelihood:
    """Cross-entropy of the labels; with scheduled sampling, of a part of the inputs that grows with the steps."""

    def __init__(self, cfg: LikelihoodConfig, max_steps: int, seed: int) -> None:
        self._cfg, self._max_steps, self._seed = cfg, max_steps, seed
        self._sampled = cfg.scheduled_sampling if isinstance(cfg, ScheduledSamplingConfig) else 0.0

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        if self._sampled:
            from lm.training.objectives.scheduled_sampling import chances, with_sampled_inputs

            chance = chances(batch, self._seed, step, first_row)
            batch = with_sampled_inputs(model, batch, self._sampled * step / self._max_steps, chance, self._cfg.chunk)
        assert batch.labels is not None
        sums: LossSums = model(batch, loss=causal_reader(batch.labels, self._cfg.label_smoothing, self._cfg.z_loss, self._cfg.chunk))
        return sums


def build_objective(cfg: ObjectiveConfig, max_steps: int, seed: int, load_reference: Callable[[], LM]) -> Objective:
    """load_reference: the model before training, for objectives that compare with it."""
    if isinstance(cfg, DPOConfig):
        from lm.training.objectives.dpo import DPO

        return DPO(cfg, load_reference)
    return Likelihood(cfg, max_steps, seed)
