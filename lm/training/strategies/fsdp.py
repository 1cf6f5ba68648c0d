"""torch's FSDP2, through Lightning's ModelParallelStrategy.  Zhao et al. 2023, arXiv:2304.11277."""

from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lm.nn.transformer import LM
from lm.storage.checkpoint import Piece
from lm.training.strategies.single import Single
from lm.training.weights import Fill, materialized


class FSDP(Single):
    """Every rank keeps a slice of each weight; a block's weights are whole only while it computes. Works on CPU with gloo."""

    meta = True

    def __init__(self, world: int) -> None:
        self.world = world

    def lightning(self) -> Any:
        return ModelParallelStrategy(data_parallel_size=self.world, tensor_parallel_size=1)

    def shard(self, model: LM, mesh: Any, fill: Fill) -> None:
        """Each block is one unit, and the root holds embedding, norm and head, so that a tied weight stays one.

        What has no gradient, the correction biases of routers, stays whole."""
        data_parallel = mesh["data_parallel"]
        device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
        for part in materialized(model, model.units(), device, fill):
            whole = {p for p in part.parameters() if not p.requires_grad}
            fully_shard(part, mesh=data_parallel, ignored_params=whole)

    def refresh(self, model: nn.Module) -> None:
        """What an evaluation has gathered is kept for the next forward, and out of date now."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def whole(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        full: Tensor = tensor.full_tensor()
        return full.detach()

    def piece(self, name: str, kind: str, tensor: Tensor) -> Piece:
        """Rows of the first dimension, which lie together in the flattened tensor."""
        if not isinstance(tensor, DTensor):
            return Piece.whole(name, kind, tensor)
        mine = tensor.to_local().detach()
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        row = tensor.numel() // max(1, tensor.shape[0])
        start = offset[0] * row if mine.numel() else 0
        return Piece(name, kind, tuple(tensor.shape), start, start + mine.numel(), mine, shared=False)
