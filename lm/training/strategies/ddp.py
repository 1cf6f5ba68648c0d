"""torch's DistributedDataParallel.  Li et al. 2020, arXiv:2006.15704."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from lm.training.strategies.base import Strategy


class DDP(Strategy):
    """Every rank has the whole model and optimizer, and they stay equal."""

    def lightning(self) -> Any:
        """With find_unused_parameters DDP keeps its gradient buckets; otherwise it reorders them after the first step, so that a resumed
        run of three ranks or more would add its gradients in another order. Unused experts of a router need the option too. Buffers are
        constants, equal on all ranks, and need not be sent at each forward."""
        return DDPStrategy(find_unused_parameters=True, broadcast_buffers=False)
