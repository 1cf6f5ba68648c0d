"""The slot of feed-forward layers."""

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from lm.nn.init import Declares
from lm.nn.kept import Kept
from lm.schema import Slot, Tree


class FFNConfig(Slot, group="model/ffn"):
    """What a layer computes of each token alone."""

    sublayers: ClassVar[int] = 1
    """How many of a layer's additions to the residual stream are its own."""

    @abstractmethod
    def build(self, d_model: int, layer: int) -> nn.Module:
        """Returns that of layer `layer`, counted from 0: a module that is called with (b, s, d) and the Context."""

    def connected(self, residual: nn.Module) -> nn.Module:
        """Returns what joins it to the residual stream, given the block's own way to do so."""
        return residual

    @abstractmethod
    def keeps(self, d_model: int, layer: int) -> Kept:
        """Returns what the backward needs of one token, the input of the layer aside."""

    def gives(self, d_model: int, layer: int) -> Kept:
        """Returns what stacked matrices give of one token, which is kept where the cheap rest is computed again; linear layers
        (nn.Linear) aside."""
        return Kept(0, 0)

    def flops(self, d_model: int, layer: int) -> int:
        """Returns those of one token, 2 per multiply-add, beside those of its linear layers (nn.Linear)."""
        return 0

    def require(self, n_layers: int) -> None:
        """Raises ValueError where so many layers do not fit."""

    def unsliced(self) -> str | None:
        """Returns why ranks cannot hold a row in slices, with the remedy; None where each token is for itself."""
        return None

    def exchanges(self, d_model: int, layer: int, n: int) -> Kept:
        """Returns what the backward needs of one token more where n ranks hold its matrices in slices: the tokens of the others, which
        it reads too."""
        return Kept(0, (n - 1) * d_model)

    def undivided(self, d_model: int, n: int) -> str | None:
        """Returns why n ranks cannot hold its matrices in slices, with the remedy; None where they can."""
        return f"ffn={self.kind} has matrices that no rank can hold a slice of. Use ffn=mlp"

    def implied(self, d_model: int) -> Tree:
        """Returns what options stand for that are null."""
        return {}


class Mixture(Declares, nn.Module):
    """A feed-forward that sends each token to some of its parts, and reports their losses and loads to `ctx.auxiliary`."""

    @abstractmethod
    def idle(self) -> int:
        """Returns how many weights a token does not pass."""

    @abstractmethod
    def balance(self, load: Tensor) -> None:
        """Moves what the layer steers.  load: (e,), tokens of each part in a whole optimizer step."""
