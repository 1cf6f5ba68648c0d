"""torch's FSDP2, through Lightning's ModelParallelStrategy.  Zhao et al. 2023, arXiv:2304.11277."""

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from math import prod
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from lm.nn.materialize import Fill, materialized
from lm.nn.transformer import LM
from lm.storage.checkpoint import Piece
from lm.training.launch.config import LaunchConfig
from lm.training.strategies.base import Strategy


class FSDP(Strategy):
    """Every rank keeps a slice of each weight; a block's weights are whole only while it computes. Works on CPU with gloo.

    `shard` neighbouring ranks hold one copy of the weights together; with more ranks there are several equal copies (HSDP).
    """

    meta = True

    def __init__(self, launch: LaunchConfig, shard: int) -> None:
        """shard: number of ranks over which one copy of the weights is sliced."""
        self.launch, self.n, self.copies = launch, shard, launch.world // shard

    def lightning(self) -> Any:
        return ModelParallelStrategy(data_parallel_size=self.launch.world, tensor_parallel_size=1)

    def shard(self, model: LM, mesh: Any, fill: Fill) -> None:
        """Shards each block as one FSDP unit; the root unit has embedding, norm and head, so that a tied weight stays a single parameter.

        Balancing biases of routers stay whole on every rank; frozen weights are sharded like all others."""
        self._model: Any = model
        data_parallel = mesh["data_parallel"]
        if self.copies > 1:
            data_parallel = mesh_of(mesh.device_type, {"copies": self.copies, "slices": self.n}, self.launch.timeout_s)
        device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
        for part in materialized(model, model.units(), device, fill):
            placed, self_updated = self._placed(part), set(model.self_updated().values()) & set(part.parameters())
            fully_shard(part, mesh=data_parallel, ignored_params=self_updated, shard_placement_fn=placed)

    def _placed(self, part: nn.Module) -> Callable[[nn.Parameter], Any] | None:
        """Returns FSDP2's `shard_placement_fn` for a part; None: all its weights are cut over the mesh along their first dimension."""
        return None

    def ready(self, optimizer: Optimizer) -> None:
        """Gathers all units once, which allocates the buffers that later gathers write into. Were an evaluation to allocate them, under
        inference mode, no training step could write them."""
        super().ready(optimizer)
        self._model._get_fsdp_state()._lazy_init()
        for module in self._units():
            module.unshard()
            module.reshard()

    def _units(self) -> list[FSDPModule]:
        return [module for module in self._model.modules() if isinstance(module, FSDPModule)]

    def refresh(self, model: nn.Module) -> None:
        """Drops the whole weights that an evaluation has left gathered for the next forward: they are out of date now."""
        for module in self._units():
            module.reshard()

    def weights(self, model: nn.Module) -> Iterator[Piece]:
        """Drops whole weights that an evaluation has left gathered, so that the pieces yielded are the live slices."""
        self.refresh(model)
        return super().weights(model)

    def whole(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        full: Tensor = tensor.full_tensor()
        return full.detach()

    def piece(self, name: str, kind: str, tensor: Tensor) -> Piece:
        """Returns this rank's slice of a tensor, with its offset; one rank of each copy of the weights holds the same slice."""
        if not isinstance(tensor, DTensor):
            return Piece.whole(name, kind, tensor)
        mine = tensor.to_local().detach()
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return Piece(name, kind, tuple(tensor.shape), tuple(offset), mine, (distributed.get_rank() // self.n, self.copies))


def mesh_of(device: str, sizes: Mapping[str, int], timeout_s: int) -> DeviceMesh:
    """Returns a mesh of all ranks with named dimensions; neighbouring ranks lie along the last one. All ranks must call it.

    torch's own init_device_mesh would give the process groups another timeout than launch.timeout_s.
    """
    ranks, mine, groups = torch.arange(prod(sizes.values())).view(*sizes.values()), distributed.get_rank(), []
    for dim, size in enumerate(sizes.values()):
        for line in ranks.movedim(dim, -1).reshape(-1, size).tolist():
            group = distributed.new_group(line, timedelta(seconds=timeout_s))
            if mine in line:
                groups.append(group)
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=tuple(sizes))
