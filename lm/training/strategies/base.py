"""What a strategy tells the training beyond what Lightning's own does. As it stands here it is one process on one device."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.nn.materialize import Fill
from lm.nn.transformer import LM
from lm.ops.ranks.ulysses import ShardedRows
from lm.storage.checkpoint import Piece
from lm.training.optim.base import begin_state, named_state

Judge = Callable[[Tensor], Tensor]  # norm of a step's full gradient -> the optimizer's `found_inf`


class Strategy:
    """Gradients are whole tensors, or sharded ones that act as whole; they are clipped here, before the optimizer's step."""

    sharding: ShardedRows | None = None  # of the rows, and of matrices, with tensor parallelism
    meta = False  # whether `shard` takes a model on the meta device, so that no rank ever holds all of it

    def lightning(self) -> Any:
        """Returns the `strategy` argument of Lightning's Trainer."""
        return "auto"

    def shard(self, model: LM, mesh: Any, fill: Fill) -> None:
        """Shards the weights over the ranks of Lightning's device mesh, before the optimizer is built; `fill` writes weights on meta."""

    def divisor(self, accumulation: int, world: int) -> int:
        """Returns the number by which Lightning and the engine divide a step's summed gradient: micro-batches, times ranks if averaged."""
        return accumulation * world

    def accumulate(self, n: int) -> None:
        """Called between steps where the steps from now on have another number of micro-batches on each rank."""

    def prepare(self, optimizer: Optimizer, judge: Judge) -> None:
        """Called once with the optimizer that the module has built.  judge: decides whether a step must be skipped."""
        self.judge = judge

    def ready(self, optimizer: Optimizer) -> None:
        """Called after the engine is set up, before the first step: from now on there is optimizer state to save and load. Called again
        where this state is to begin anew."""
        begin_state(optimizer)

    def clip(self, model: nn.Module, optimizer: Optimizer, limit: float | None) -> None:
        """Scales a step's gradient down to the norm `limit`, and tells the optimizer whether to skip the step."""
        parts = self.alike([p.grad for p in model.parameters() if p.grad is not None])
        norm = self.norm(parts)
        if limit is not None:
            for grads in filter(None, parts):
                torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))
        optimizer.found_inf = self.judge(norm)  # type: ignore[attr-defined]

    def alike(self, grads: list[Tensor]) -> list[list[Tensor]]:
        """Returns the gradients in groups that one foreach kernel can take."""
        return [grads]

    def norm(self, parts: list[list[Tensor]]) -> Tensor:
        """Returns the norm of the full gradient.  parts: the groups from `alike`."""
        at_once = all(grad.device.type != "mps" for grad in parts[0][:1])  # where torch refuses it
        return self.whole(torch.nn.utils.get_total_norm(parts[0], foreach=at_once))

    def settle(self) -> None:
        """Called after each optimizer step, for engines that may have skipped it by themselves."""

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns the whole of a weight or norm that may be sharded over the ranks. Every rank must call it, in the same order."""
        return tensor.detach()

    def weights(self, model: nn.Module) -> Iterator[Piece]:
        """Returns this rank's live slices of all weights; a tied weight comes once."""
        return (self.piece(name, "weight", p) for name, p in model.named_parameters())

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> Iterator[Piece]:
        """Returns this rank's live slices of the optimizer's state, under the names of the weights."""
        return (self.piece(name, kind, tensor) for name, kind, tensor in named_state(optimizer))

    def piece(self, name: str, kind: str, tensor: Tensor) -> Piece:
        """Returns this rank's slice of a weight or of its state; here all of it."""
        return Piece.whole(name, kind, tensor)

    def writing(self, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        """Inside the block these weights are whole and may be written; every rank must write the same values."""
        return nullcontext()

    def refresh(self, model: nn.Module) -> None:
        """Called after all slices have been overwritten, for engines that keep a further copy of the weights."""
