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
