"""One process; and, as the base of the other strategies, what training must know of an engine beside what Lightning knows."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.nn.transformer import LM
from lm.ops.ranks.ulysses import Slices
from lm.storage.checkpoint import Piece
from lm.training.optim.base import begin_state, named_state
from lm.training.weights.initial import Fill

Judge = Callable[[Tensor], Tensor]  # the norm of a step's whole gradient -> the optimizer's `found_inf`


class Single:
    """Gradients are whole, or sharded tensors that behave so; they are clipped here, before the optimizer's step."""

    slices: Slices | None = None  # of rows and matrices, where ranks hold these
    meta = False  # whether `shard` takes a model on the meta device, so that no rank ever holds all of it

    def lightning(self) -> Any:
        """What Lightning's Trainer takes as `strategy`."""
        return "auto"

    def shard(self, model: LM, mesh: Any, fill: Fill) -> None:
        """Split the weights over the ranks of Lightning's device mesh, before the optimizer is built; `fill` them where they are meta."""

    def divisor(self, accumulation: int, world: int) -> int:
        """What Lightning and the engine divide the sum of a step's gradients by: micro-batches, and ranks when they average."""
        return accumulation * world

    def prepare(self, optimizer: Optimizer, judge: Judge) -> None:
        """Called once with the optimizer that the module has built, and with what judges each of its steps."""
        self.judge = judge

    def ready(self, optimizer: Optimizer) -> None:
        """Called once when the engine stands, before the first step: from now on there is state to save and load."""
        begin_state(optimizer)

    def clip(self, model: nn.Module, optimizer: Optimizer, limit: float | None) -> None:
        """Scale a step's gradient down to the norm `limit`, and tell the optimizer whether to skip the step."""
        parts = self.alike([p.grad for p in model.parameters() if p.grad is not None])
        norm = self.norm(parts)
        if limit is not None:
            for grads in filter(None, parts):
                torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))
        optimizer.found_inf = self.judge(norm)  # type: ignore[attr-defined]

    def alike(self, grads: list[Tensor]) -> list[list[Tensor]]:
        """Those that one kernel takes at once."""
        return [grads]

    def norm(self, parts: list[list[Tensor]]) -> Tensor:
        """Of the whole gradient, in the parts of `alike`."""
        return self.whole(torch.nn.utils.get_total_norm(parts[0], foreach=True))

    def settle(self) -> None:
        """Called after each optimizer step, for engines that may have left it out by themselves."""

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a weight or norm that may be split over the ranks. Every rank must call it, in the same order."""
        return tensor.detach()

    def weights(self, model: nn.Module) -> Iterator[Piece]:
        """The live slices of all weights that this rank holds; a tied weight once."""
        return (self.piece(name, "weight", p) for name, p in model.named_parameters())

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> Iterator[Piece]:
        """The live slices of the optimizer's state that this rank holds, under the name of their parameter."""
        return (self.piece(name, kind, tensor) for name, kind, tensor in named_state(optimizer))

    def piece(self, name: str, kind: str, tensor: Tensor) -> Piece:
        """The slice that this rank holds of a tensor that torch knows as whole."""
        return Piece.whole(name, kind, tensor)

    def writing(self, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        """Inside the block these weights are whole and may be written, by all ranks alike."""
        return nullcontext()

    def refresh(self, model: nn.Module) -> None:
        """Called when all slices have been written from outside, for engines that keep a copy of the weights."""
