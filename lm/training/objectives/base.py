"""The interface of training objectives and their registry by config class (lm/losses/tokens.py computes the sums).

All modules of this package are imported when an objective is built, so that each has registered its own.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from lm.losses.cross_entropy import LossSums
from lm.nn.batch import Batch
from lm.nn.transformer import LM
from lm.storage.checkpoint import CheckpointReader, Piece
from lm.training import objectives

if TYPE_CHECKING:
    from lm.training.config import TrainConfig


class Objective(Protocol):
    """The loss of one micro-batch, as sums over the units that its `step_tokens` count."""

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        """Returns the sums of one micro-batch.  step: optimizer steps taken before.  first_row: index of the batch's first row among all
        rows of the step, over ranks and micro-batches."""


@runtime_checkable
class Keeping(Objective, Protocol):
    """One with a state of its own, which a checkpoint holds."""

    def pieces(self, step: int) -> Iterator[Piece]:
        """Yields this rank's pieces for a checkpoint of this step."""

    def resume(self, reader: CheckpointReader) -> None:
        """Goes on with the state in a checkpoint."""


@runtime_checkable
class Timed(Objective, Protocol):
    """One that tells what its time goes by for."""

    spent: Mapping[str, float]
    """Seconds in this process so far by names that end in _s, the same on all ranks at each step."""


Build = Callable[[Any, "TrainConfig"], Objective]
B = TypeVar("B", bound=Build)
LOSSES: dict[type, Build] = {}


def loss_of(kind: type) -> Callable[[B], B]:
    """Registers a builder, called with (objective config, run config), for an ObjectiveConfig class and the classes derived from it."""

    def register(build: B) -> B:
        LOSSES[kind] = build
        return build

    return register


def build_objective(cfg: "TrainConfig") -> Objective:
    """Returns the run's objective, built by the builder of the config's class or its nearest base class that has one."""
    for info in iter_modules(objectives.__path__):
        import_module(f"{objectives.__name__}.{info.name}")
    kind = next(kind for kind in type(cfg.objective).__mro__ if kind in LOSSES)
    return LOSSES[kind](cfg.objective, cfg)
