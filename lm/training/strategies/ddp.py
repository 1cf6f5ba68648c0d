"""torch's DistributedDataParallel.  Li et al. 2020, arXiv:2006.15704."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from lm.training.strategies.single import Single


class DDP(Single):
    """Every rank has the whole model and optimizer, and they stay equal."""

    def lightning(self) -> Any:
        """Looking for unused parameters keeps the buckets as they are, where DDP otherwise orders them anew after its first step: a
        resumed run of three ranks or more would add its gradients in another order. A router's unused experts need it too."""
        return DDPStrategy(find_unused_parameters=True)
