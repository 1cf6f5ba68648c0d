"""FSDP2 with tensor parallelism: a grid of ranks, some of which hold slices of the matrices and compute with these."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lm.errors import ConfigError
from lm.nn.materialize import Fill
from lm.nn.transformer import LM
from lm.ops.ranks.tensor_parallel import Divisible, TensorParallel
from lm.storage.checkpoint import Piece
from lm.training.optim.base import CUTS, RANKS, Group
from lm.training.optim.slices import by_slices
from lm.training.strategies.base import Judge
from lm.training.strategies.fsdp import FSDP, mesh_of


class DividedFSDP(FSDP):
    """launch.tensor neighbouring ranks hold slices of the same matrices, and FSDP2 cuts each slice again over the ranks that hold the same
    one. All other weights FSDP2 cuts over all ranks, since each rank computes with them on different tokens."""

    def shard(self, model: LM, mesh: Any, fill: Fill) -> None:
        try:
            from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
        except ImportError:
            raise ConfigError(f"launch.tensor needs torch 2.12, and this is {torch.__version__}. Install it, or leave it out.") from None
        n = self.launch.tensor
        grid = mesh_of(mesh.device_type, {"copies": self.copies, "slices": self.n // n, "tensor": n}, self.launch.timeout_s)
        self._group, self._mesh = grid.get_group("tensor"), grid["copies", "slices"] if self.copies > 1 else grid["slices"]
        info = HSDPMeshInfo(self._mesh, 1, 0) if self.copies > 1 else FSDPMeshInfo(self._mesh, 0)
        self._placement = ShardPlacementResult(Shard(0), info)
        self.sharding: TensorParallel = TensorParallel(self._group, grid.get_local_rank("tensor"), n)
        self._copy = mesh_of(mesh.device_type, {"copies": self.copies, "ranks": self.n}, self.launch.timeout_s).get_group("ranks")
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._cut = {name: dim for name, dim in cut_weights(model) if name in self._shapes}
        self._joined: set[nn.Module] = set()
        super().shard(model, mesh, fill)
        for stack in model.stacks():
            stack.parts = [replace(parts, mixer=parts.mixer.divided(parts.d_model, n)) for parts in stack.parts]

    def _placed(self, part: nn.Module) -> Callable[[nn.Parameter], Any] | None:
        modules = [module for module in part.modules() if isinstance(module, Divisible) and module not in self._joined]
        mine = {p for module in modules for p in self.sharding.divide(module)}
        self._joined.update(modules)
        self._model.tie()
        return lambda p: self._placement if p in mine else None

    def _divided(self, tensor: Tensor) -> bool:
        return isinstance(tensor, DTensor) and tensor.device_mesh == self._mesh

    def prepare(self, optimizer: Optimizer, judge: Judge) -> None:
        """Splits the optimizer's groups by mesh: a foreach kernel cannot take weights of two meshes at once."""
        super().prepare(optimizer, judge)
        optimizer.param_groups[:] = [part for group in optimizer.param_groups for part in self._apart(group)]

    def _apart(self, group: Group) -> Iterator[Group]:
        for divided in (False, True):
            found = [(name, p) for name, p in zip(group["names"], group["params"], strict=True) if self._divided(p) is divided]
            if found:
                yield group | {"names": [name for name, _ in found], "params": [p for _, p in found]} | self._cuts(dict(found), divided)

    def _cuts(self, named: dict[str, Any], divided: bool) -> Group:
        """Returns the group entries for an optimizer that gathers whole matrices by itself: how they are cut, and over which ranks."""
        if not divided:
            return {}
        cut = {p: by_slices(self._shapes[name], self._cut[name], self.sharding.n, self._mesh.size(-1)) for name, p in named.items()}
        return {CUTS: cut, RANKS: self._copy}

    def clip(self, model: nn.Module, optimizer: Optimizer, limit: float | None) -> None:
        """First divides the gradients of tensor-parallel slices by launch.tensor: FSDP2 averages them over only the ranks with the same
        slice, which are fewer than all ranks by that factor, while the loss is multiplied by all of them."""
        if grads := [p.grad for p in model.parameters() if p.grad is not None and self._divided(p.grad)]:  # not all of them frozen
            torch._foreach_div_(grads, self.launch.tensor)
        super().clip(model, optimizer, limit)

    def alike(self, grads: list[Tensor]) -> list[list[Tensor]]:
        return [[grad for grad in grads if self._divided(grad) is divided] for divided in (False, True)]

    def norm(self, parts: list[list[Tensor]]) -> Tensor:
        """The first part is sharded over all ranks; the second differs between tensor-parallel ranks, so its squares are added up."""
        device = next(grad.device for grads in parts for grad in grads)  # the norm of an empty list is on the CPU
        wide, narrow = (self.whole(get_total_norm(grads, foreach=True)).to(device).square() for grads in parts)
        torch.distributed.all_reduce(narrow, group=self._group)
        return (wide + narrow).sqrt()

    def piece(self, name: str, kind: str, tensor: Tensor) -> Piece:
        """Gives shape and offset in the whole matrix, of which FSDP2 knows only a tensor-parallel slice."""
        found = super().piece(name, kind, tensor)
        if name not in self._cut or not isinstance(tensor, DTensor):
            return found
        dim, offset = self._cut[name], [*found.offset]
        offset[dim] += self.sharding.part(self._shapes[name][dim]).start
        return replace(found, shape=tuple(self._shapes[name]), offset=tuple(offset))


def cut_weights(model: LM) -> Iterator[tuple[str, int]]:
    """Yields (name, cut dimension) of each weight that tensor-parallel ranks hold in slices."""
    for prefix, module in model.named_modules():
        if isinstance(module, Divisible):
            yield from ((f"{prefix}.{name}", dim) for name, dim in module.cut.items())
