"""Optimizers as training has them before the first step."""

from collections.abc import Container, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lm.training.optim.base import OptimConfig, begin_state
from lm.training.optim.traits import Traits


def built(cfg: OptimConfig, named: Iterable[tuple[str, nn.Parameter]], matrices: Container[str]) -> Optimizer:
    """Over what is trainable."""
    trainable = [(name, p) for name, p in named if p.requires_grad]
    return cfg.build(trainable, {name: Traits(name in matrices, p.ndim > 1 and not name.endswith("bias")) for name, p in trainable})


def begun(*args: Any) -> Any:
    """The same with its first state."""
    optimizer = built(*args)
    begin_state(optimizer)
    return optimizer
