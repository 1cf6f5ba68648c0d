"""A model that has an adapter, as it is without."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lm.nn.init import Declares


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Within the block the model, in eval mode, computes what the one beside which its adapter is trained does."""
    adapted = [module for module in model.modules() if isinstance(module, Declares) and module.adapting]
    was_training = model.training
    model.eval()
    for module in adapted:
        module.silent = True
    try:
        yield
    finally:
        model.train(was_training)
        for module in adapted:
            module.silent = False
