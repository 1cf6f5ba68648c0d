"""Averages of the weights over the steps, which are validated and exported in their place."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from lm.nn.transformer import LM
from lm.storage.checkpoint import Piece
from lm.training.config import TrainConfig
from lm.training.optim.adamw import AdamWConfig
from lm.training.optim.schedule import FreeConfig
from lm.training.strategies.base import Strategy
from lm.training.weights.freeze import trainable


class Averages(ABC):
    """Averages in float32 that begin as the initial weights."""

    def __init__(self, strategy: Strategy, model: nn.Module, weights: Iterable[Piece]) -> None:
        """weights: this rank's pieces of the weights to average."""
        self._strategy, self._model = strategy, model
        self._weights = [*weights]
        self._averages = [piece.tensor.detach().float().clone() for piece in self._weights]

    def before(self) -> None:  # noqa: B027, nothing is what an average does by itself
        """Called when the gradients of a step are complete, before the optimizer moves the weights."""

    @abstractmethod
    def update(self, step: int, refused: Tensor) -> None:
        """Updates the averages with the weights after a step.  step: counted from 0.  refused: () bool, it has changed nothing."""

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside the block the model computes with the averages. They swap places with the weights one by one, so that no third copy
        exists; where weights have a narrower dtype, it is averages rounded to that dtype that take their place."""
        averages = [average.to(piece.tensor.dtype) for piece, average in zip(self._weights, self._averages, strict=True)]
        self._exchange(averages)
        try:
            yield
        finally:
            self._exchange(averages)

    @torch.no_grad()
    def _exchange(self, averages: list[Tensor]) -> None:
        for piece, average in zip(self._weights, averages, strict=True):
            weight = piece.tensor.clone()
            piece.tensor.copy_(average)
            average.copy_(weight)
        self._strategy.refresh(self._model)

    def pieces(self) -> Iterator[Piece]:
        """Yields the averages' slices for a checkpoint."""
        return (replace(piece, kind="ema", tensor=average) for piece, average in zip(self._weights, self._averages, strict=True))


class EMA(Averages):
    """average <- decay * average + (1 - decay) * weight."""

    def __init__(self, strategy: Strategy, model: nn.Module, weights: Iterable[Piece], decay: float) -> None:
        super().__init__(strategy, model, weights)
        self._decay = decay

    @torch.no_grad()
    def update(self, step: int, refused: Tensor) -> None:
        torch._foreach_lerp_(self._averages, [piece.tensor.float() for piece in self._weights], 1 - self._decay)


class ScheduleFree(Averages):
    """average <- (1 - c) * average + c * iterate, where iterates are what the optimizer moves, and c is the schedule's share; the model
    computes with (1 - beta) * iterate + beta * average.  Defazio et al. 2024, arXiv:2405.15682, equations 3 to 5, for any optimizer."""

    def __init__(self, strategy: Strategy, model: nn.Module, weights: Iterable[Piece], schedule: FreeConfig) -> None:
        super().__init__(strategy, model, weights)
        self._schedule = schedule
        self._iterates = [piece.tensor.detach().clone() for piece in self._weights]

    @torch.no_grad()
    def before(self) -> None:
        torch._foreach_copy_([piece.tensor for piece in self._weights], self._iterates)

    @torch.no_grad()
    def update(self, step: int, refused: Tensor) -> None:
        weights = [piece.tensor for piece in self._weights]
        moved = [weight.float() for weight in weights]  # where these are float32, the weights themselves
        torch._foreach_copy_(self._iterates, weights)
        torch._foreach_lerp_(self._averages, moved, [self._schedule.share(step) * ~refused] * len(moved))
        torch._foreach_lerp_(moved, self._averages, self._schedule.beta)
        for weight, between in zip(weights, moved, strict=True):
            if weight is not between:
                weight.copy_(between)

    def pieces(self) -> Iterator[Piece]:
        yield from super().pieces()
        yield from (replace(piece, kind="iterate", tensor=iterate) for piece, iterate in zip(self._weights, self._iterates, strict=True))


def averages_of(cfg: TrainConfig, strategy: Strategy, model: LM, weights: Iterable[Piece]) -> Averages | None:
    """Returns the averages that a run keeps of those of its weights that move; None where it keeps none. Balancing biases, which no
    gradient moves, are in an EMA alone.  weights: this rank's pieces of what the run saves."""
    by_gradient, decay = {*trainable(model)}, cfg.trainer.ema_decay
    if isinstance(cfg.schedule, FreeConfig):
        return ScheduleFree(strategy, model, (piece for piece in weights if piece.name in by_gradient), cfg.schedule)
    if decay is None:
        return None
    moved = by_gradient | model.self_updated().keys()
    return EMA(strategy, model, (piece for piece in weights if piece.name in moved), decay)


def on_momentum(cfg: TrainConfig) -> str | None:
    """Returns what to say of a run whose optimizer has a momentum beside the one that the schedule is; None where there is none."""
    if not (isinstance(cfg.schedule, FreeConfig) and cfg.schedule.beta and isinstance(cfg.optim, AdamWConfig) and cfg.optim.beta1):
        return None
    return f"optim.beta1={cfg.optim.beta1}: schedule.beta={cfg.schedule.beta} takes the place of that momentum; try optim.beta1=0"
