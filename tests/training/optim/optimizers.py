"""Optimizers as training has them before the first step."""

from typing import Any

from lm.training.optim.build import begin_state, build_optimizer


def begun(*args: Any) -> Any:
    """`build_optimizer` and its first state."""
    optimizer = build_optimizer(*args)
    begin_state(optimizer)
    return optimizer
