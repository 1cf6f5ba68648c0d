"""torch's FSDP2, through Lightning's ModelParallelStrategy.  Zhao et al. 2023, arXiv:2304.11277."""

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lm.nn.transformer import LM
from lm.training.strategies.single import Single


class FSDP(Single):
    """Every rank keeps a slice of each weight; a block's weights are whole only while it computes. Works on CPU with gloo."""

    def __init__(self, world: int) -> None:
        self.world = world

    def lightning(self) -> Any:
        return ModelParallelStrategy(data_parallel_size=self.world, tensor_parallel_size=1)

    def shard(self, model: LM, mesh: Any) -> None:
        """Each block is one unit, and the root holds embedding, norm and head, so that a tied weight stays one."""
        data_parallel = mesh["data_parallel"]
        for block in model.units():
            fully_shard(block, mesh=data_parallel)
        fully_shard(model, mesh=data_parallel)

    def whole(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        full: Tensor = tensor.full_tensor()
        return full.detach()
