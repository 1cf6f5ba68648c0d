"""The layers of torch that do something more, or less, here."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor, nn

from lm.nn.init import Declares, Draw, into_residual
from lm.ops.linear import product


class Linear(nn.Linear):
    """torch's, by the fastest kernel, or by what a module is told."""

    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(product)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight, self.bias)


class AskedLinear(Linear):
    """One whose matrix is also asked for by itself."""

    def matrix(self) -> Tensor:
        """Returns W of W x + b, (out, in)."""
        return self.weight


class Out(Declares, Linear):
    """A projection that writes to the residual stream; it starts scaled by depth."""

    drawn: ClassVar[Mapping[str, Draw]] = {"weight": into_residual}


PLAIN = (nn.Linear, Linear, Out)  # of which the forward is known to be W x + b


class Embedding(nn.Embedding):
    """A table that draws nothing when it is built: `init_weights` does, or a file brings it. On the meta device torch would load its
    compiler to draw."""

    def reset_parameters(self) -> None:
        """Leaves the weights as they are."""
