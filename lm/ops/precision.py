"""Computing in higher precision than the code around."""

import platform
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context manager that switches autocast off; the meta device has no autocast."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def uncached_casts(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context manager in which autocast, where it is on, casts a weight at each use, so that gradients of several uses are summed
    in the weight's dtype."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)


def multiplies_bf16(device: torch.device) -> bool:
    """Returns whether the hardware has products in bf16, which torch else imitates, slowly."""
    return torch.cpu._is_avx512_bf16_supported() if device.type == "cpu" else torch.cuda.is_bf16_supported(including_emulation=False)


def instead_of_bf16(kind: str) -> str | None:
    """Returns what is faster where torch imitates products in bf16 on a device of this kind, in a sentence; None where it does not."""
    if kind == "cpu" and platform.machine() in ("x86_64", "AMD64") and not multiplies_bf16(torch.device(kind)):
        return "this CPU has no products in bf16, and torch imitates them: trainer.precision=fp32 is several times as fast"
    if kind == "cuda" and not multiplies_bf16(torch.device(kind)):
        return "this GPU has no products in bf16, and torch imitates them: trainer.precision=fp16-mixed uses its own"
    return None


def widest(device: torch.device) -> torch.dtype:
    """Returns float64, or float32 on a Mac's GPU, which has none wider."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide_dtype(x: Tensor) -> torch.dtype:
    """Returns float32, or the dtype of x where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """Returns x in float32, or in its own dtype where that is wider."""
    return x.to(wide_dtype(x))
