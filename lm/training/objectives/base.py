"""What a training step makes of a model and a batch, and how an objective's config finds it (lm/nn/loss.py does the sums)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lm.nn.batch import Batch
from lm.nn.loss import LossSums
from lm.nn.transformer import LM

if TYPE_CHECKING:
    from lm.training.config import TrainConfig


class Objective(Protocol):
    """The loss of one micro-batch, as sums over what its `step_tokens` count."""

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        """step: optimizer steps taken before.  first_row: the number of the batch's first row among all rows of the step."""


Build = Callable[[Any, "TrainConfig"], Objective]
B = TypeVar("B", bound=Build)
LOSSES: dict[type, Build] = {}


def loss_of(kind: type) -> Callable[[B], B]:
    """Registers what makes the loss of this kind of ObjectiveConfig and those derived from it, called with its config and the run's."""

    def register(build: B) -> B:
        LOSSES[kind] = build
        return build

    return register
