"""torch's linear layer and embedding with small changes: a faster kernel, and initial weights that are declared or drawn later."""

from collections.abc import Callable

from torch import Tensor, nn

from lm.nn.init import Declares, into_residual
from lm.ops.linear import product


class Linear(nn.Linear):
    """`nn.Linear` with the fastest kernel; float8 training replaces `multiply`."""

    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(product)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight, self.bias)


class AskedLinear(Linear):
    """A Linear whose matrix W other code also reads directly, by `matrix`."""

    def matrix(self) -> Tensor:
        """Returns W of W x + b, (out, in)."""
        return self.weight


class Out(Declares, Linear):
    """A projection that writes to the residual stream; its initial weights are scaled down with depth."""

    initializers = {"weight": into_residual}


PLAIN = (nn.Linear, Linear, Out)  # classes whose forward is known to be W x + b


class Embedding(nn.Embedding):
    """An `nn.Embedding` whose weights are not drawn when it is built: `init_weights` draws them, or they are read from a file. To draw
    on the meta device, torch would load its compiler."""

    def reset_parameters(self) -> None:
        """Leaves the weights as they are."""
