"""Weights, optimizer state and averaged weights to and from checkpoint pieces, bit for bit."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.checkpoint import CheckpointReader, Piece
from lm.errors import CheckpointError
from lm.model_folder import require_same_shapes

_NEUTRAL = {"momentum_buffer": "momentum"}  # torch's name: the checkpoint's; the others agree


def weight_pieces(named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[Piece]:
    """Weights in their own dtype. `named_parameters()` yields a tied weight once."""
    return (Piece.whole(name, "weight", p) for name, p in named)


def load_weights(named: Iterable[tuple[str, nn.Parameter]], reader: CheckpointReader) -> None:
    """Copy every weight in place; CheckpointError names the first mismatches of name or shape."""
    weights = dict(named)
    saved = {name: reader.shape(name) for name in reader.names() if "weight" in reader.kinds(name)}
    require_same_shapes({name: tuple(p.shape) for name, p in weights.items()}, saved, str(reader.folder))
    with torch.no_grad():
        for name, p in weights.items():
            p.copy_(reader.read(name).view(p.shape))


def optimizer_pieces(optimizer: Optimizer) -> Iterator[Piece]:
    """Every state tensor in float32, under the name of its parameter."""
    return (Piece.whole(name, kind, tensor.float()) for name, kind, tensor in _state(optimizer))


def load_optimizer(optimizer: Optimizer, reader: CheckpointReader) -> None:
    """Copy every state tensor in place; CheckpointError where the checkpoint lacks one."""
    for name, kind, tensor in _state(optimizer):
        if kind not in reader.kinds(name):
            raise CheckpointError(
                f"{reader.folder}: the optimizer's {kind} of {name} is missing, and a resumed run needs it."
                " Set resume.fresh_optimizer=true to start the optimizer anew."
            )
        tensor.copy_(reader.read(name, kind).view(tensor.shape))


def _state(optimizer: Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    for group in optimizer.param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            for key, tensor in optimizer.state[p].items():
                yield name, _NEUTRAL.get(key, key), tensor


class EMA:
    """average <- decay * average + (1 - decay) * weight, in float32, from the weights at the start on."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        self._weights = dict(named)
        self._decay = decay
        self._averages = {name: p.detach().float().clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        weights = [p.float() for p in self._weights.values()]
        torch._foreach_lerp_(list(self._averages.values()), weights, 1 - self._decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model computes with the averages inside the block."""
        own = {name: p.detach().clone() for name, p in self._weights.items()}
        self._write(self._averages)
        try:
            yield
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, p in self._weights.items():
            p.copy_(values[name])

    def pieces(self) -> Iterator[Piece]:
        return (Piece.whole(name, "ema", average) for name, average in self._averages.items())

    def load(self, reader: CheckpointReader) -> None:
        for name, average in self._averages.items():
            average.copy_(reader.read(name, "ema").view(average.shape))
