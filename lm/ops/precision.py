"""What is computed wider than the rest."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Returns what switches autocast off within it; the meta device has none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def wide(x: Tensor) -> Tensor:
    """In float32, or wider where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
