"""Backwards by hand that cannot be differentiated again: torch's `once_differentiable`, which refuses in all cases."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from lm.errors import ConfigError


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the backward of an autograd.Function, to raise ConfigError where create_graph asks for its own derivative.

    Autograd knows no history of the tensors that the forward has saved, so that a second derivative would lack terms. torch's decorator
    says so only if the incoming gradient has a history and all leaves are asked for. Compilers refuse by themselves.
    """

    @wraps(backward)
    def first(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            rule = "second derivatives were asked for, and the fast paths have a first one only"
            remedy = "Take logits in float64, not read=, of a model without experts, within torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
            raise ConfigError(f"create_graph=True: {rule}. {remedy}.")
        with torch.no_grad():
            return backward(ctx, *grads)

    return first
