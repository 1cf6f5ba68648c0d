"""What a training step makes of a model and a batch (lm/nn/loss.py does the sums)."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from lm.data.rows.config import LikelihoodConfig, ObjectiveConfig, PreferenceConfig, Sampled
from lm.nn.batch import Batch
from lm.nn.head import Reader
from lm.nn.loss import LossSums
from lm.nn.transformer import LM


class Objective(Protocol):
    """The loss of one micro-batch, as sums over what its `step_tokens` count."""

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        """step: optimizer steps taken before.  first_row: the number of the batch's first row among all rows of the step."""


class Likelihood:
    """Cross-entropy of the labels; with scheduled sampling, of a part of the inputs that grows with the steps."""

    def __init__(self, cfg: LikelihoodConfig, max_steps: int, seed: int) -> None:
        self._cfg, self._max_steps, self._seed = cfg, max_steps, seed
        self._sampled = cfg.own_tokens if isinstance(cfg, Sampled) else 0.0

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        if self._sampled:
            from lm.training.objectives.scheduled_sampling import chances, with_own_tokens

            chance = chances(batch, self._seed, step, first_row)
            batch = with_own_tokens(model, batch, self._sampled * step / self._max_steps, chance, self._cfg.chunk)
        assert batch.labels is not None
        sums: LossSums = model(batch, loss=causal_reader(batch.labels, self._cfg))
        return sums


def build_objective(cfg: ObjectiveConfig, max_steps: int, seed: int, load_reference: Callable[[], LM]) -> Objective:
    """load_reference: the model before training, for objectives that compare with it."""
    if isinstance(cfg, PreferenceConfig):
        from lm.training.objectives.dpo import Preference

        return Preference(cfg, load_reference)
    return Likelihood(cfg, max_steps, seed)


def causal_reader(labels: Tensor, cfg: LikelihoodConfig) -> Reader:
    """What to pass as `loss` to a model's forward: LossSums over the label tokens of this batch.  labels: (b, s)."""
    from lm.nn import loss  # brings torch's compiler, a second that a mere composition need not wait

    return loss.causal_reader(labels, cfg.label_smoothing, cfg.z_loss, cfg.chunk)
