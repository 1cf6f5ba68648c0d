"""An exponential moving average of the weights, which is validated and exported in their place."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from lm.storage.checkpoint import Piece
from lm.training.strategies.base import Strategy


class EMA:
    """average <- decay * average + (1 - decay) * weight, in float32; the averages begin as the initial weights."""

    def __init__(self, strategy: Strategy, model: nn.Module, weights: Iterable[Piece], decay: float) -> None:
        """weights: this rank's pieces of the weights to average."""
        self._strategy, self._model, self._decay = strategy, model, decay
        self._weights = [*weights]
        self._averages = [piece.tensor.detach().float().clone() for piece in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        """Updates the averages with the weights after a step."""
        torch._foreach_lerp_(self._averages, [piece.tensor.float() for piece in self._weights], 1 - self._decay)

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
