"""Float64 throughout, so that a comparison is of two formulas and not of two orders of rounding, on every processor alike."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # of values of size 1: some millions of roundings of 1e-16


class Doubles(TorchFunctionMode):
    """Within it, who asks for float32 gets float64: norms, softmax, angles, routers and losses ask for it, on either side."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is Tensor.float:
            return Tensor.double(*args)
        if not kwargs and len(args) < 2:  # most calls: they ask for nothing
            return func(*args)
        return func(*map(_wider, args), **{key: _wider(value) for key, value in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def same(found: Tensor, expected: Tensor, what: str = "") -> None:
    """Within 1e-9 of the size of what is expected, both in float64."""
    assert found.dtype == expected.dtype == torch.float64
    size = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found / size, expected / size, rtol=0.0, atol=1e-9, msg=lambda m: f"{what}: {m}")


def near(found: Tensor, expected: Tensor) -> None:
    """Of what computes in float32 for good: within 3e-5 of the size of what is expected, some hundred roundings of 6e-8."""
    size = float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=3e-5 * size)
