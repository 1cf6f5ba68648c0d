"""Weights, optimizer state and averaged weights to and from checkpoint pieces, bit for bit."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from lm.errors import CheckpointError
from lm.storage.checkpoint import CheckpointReader, Piece


@torch.no_grad()
def load_pieces(pieces: Iterable[Piece], reader: CheckpointReader) -> None:
    """Fill the live slices, each from its own range of the checkpoint; CheckpointError where the checkpoint lacks one."""
    for piece in pieces:
        if piece.kind not in reader.kinds(piece.name):
            raise CheckpointError(
                f"{reader.folder}: the optimizer's {piece.kind} of {piece.name} is missing, and a resumed run needs it."
                " Set resume.fresh_optimizer=true to start the optimizer anew."
            )
        piece.tensor.copy_(reader.read(piece.name, piece.kind, piece.start, piece.stop).view(piece.tensor.shape))


class EMA:
    """average <- decay * average + (1 - decay) * weight, in float32, from the weights at the start on."""

    def __init__(self, weights: Iterable[Piece], decay: float, refresh: Callable[[], None] = lambda: None) -> None:
        """weights: live slices.  refresh: called whenever they have been written."""
        self._weights = list(weights)
        self._decay, self._refresh = decay, refresh
        self._averages = [piece.tensor.detach().float().clone() for piece in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self._averages, [piece.tensor.float() for piece in self._weights], 1 - self._decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model computes with the averages inside the block."""
        own = [piece.tensor.detach().clone() for piece in self._weights]
        self._write(self._averages)
        try:
            yield
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for piece, value in zip(self._weights, values, strict=True):
            piece.tensor.copy_(value)
        self._refresh()

    def pieces(self) -> Iterator[Piece]:
        return (replace(piece, kind="ema", tensor=average) for piece, average in zip(self._weights, self._averages, strict=True))
