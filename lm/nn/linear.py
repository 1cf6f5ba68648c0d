"""The layers of torch that do something more, or less, here."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lm.nn.init import Declares, Draw, into_residual


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Returns what switches autocast off within it; the meta device has none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q in -127 .. 127, (out, in), and a bfloat16 scale for each row, (out,): W is about scale q."""
    wide = weight.float()
    scale = (wide.abs().amax(1) / 127).clamp(min=1e-30).to(torch.bfloat16)
    return (wide / scale.float().unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8), scale  # q is of the rounded scale


def of_int8_rows(q: Tensor, scale: Tensor) -> Tensor:
    """Returns scale q, in float32."""
    return q.float() * scale.float().unsqueeze(1)


class Linear(nn.Linear):
    """torch's, where the matrix is also asked for by itself."""

    def matrix(self) -> Tensor:
        """Returns W of W x + b, (out, in)."""
        return self.weight


class Out(Declares, nn.Linear):
    """A projection that writes to the residual stream; it starts scaled by depth."""

    drawn: ClassVar[Mapping[str, Draw]] = {"weight": into_residual}


class Embedding(nn.Embedding):
    """A table that draws nothing when it is built: `init_weights` does, or a file brings it. On the meta device torch would load its
    compiler to draw."""

    def reset_parameters(self) -> None:
        """Leaves the weights as they are."""
