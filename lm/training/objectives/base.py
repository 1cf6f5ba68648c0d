"""What a training step makes of a model and a batch, and how an objective's config finds it (lm/losses/tokens.py does the sums).

Every module beside this one is imported when a loss is built, and so has registered its own.
"""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lm.losses.tokens import LossSums
from lm.nn.batch import Batch
from lm.nn.transformer import LM
from lm.training import objectives

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


def build_objective(cfg: "TrainConfig") -> Objective:
    """Returns the loss of the nearest class that has one."""
    for info in iter_modules(objectives.__path__):
        import_module(f"{objectives.__name__}.{info.name}")
    kind = next(kind for kind in type(cfg.objective).__mro__ if kind in LOSSES)
    return LOSSES[kind](cfg.objective, cfg)
