"""The slot of feed-forward layers."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

from torch import Tensor, nn

from lm.nn.activation_memory import Activations
from lm.nn.init import Declares
from lm.schema import Slot, Tree


class FFNConfig(Slot, group="model/ffn"):
    """What a layer computes of each token alone."""

    sublayers: ClassVar[int] = 1
    """How many of a layer's additions to the residual stream are its own."""
    norms_itself: ClassVar[bool] = False
    """It reads the residual stream itself, where norms stand before sublayers."""

    @abstractmethod
    def build(self, d_model: int, layer: int) -> nn.Module:
        """Returns the feed-forward of layer `layer`, counted from 0: a module that is called with (b, s, d) and the Context."""

    def in_layer(self, layer: int, n_layers: int) -> Self:
        """Returns the config of this layer's, of so many in its stack."""
        return self

    def connected(self, residual: nn.Module) -> nn.Module:
        """Returns the module that joins the feed-forward to the residual stream, given the block's residual connection."""
        return residual

    @abstractmethod
    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Returns what autograd saves of one token for the backward, the input of the layer aside."""

    def kernel_outputs(self, d_model: int, layer: int) -> Activations:
        """Returns the outputs of stacked matrices for one token, which selective recomputation keeps; linear layers (nn.Linear) aside."""
        return Activations(0, 0)

    def flops(self, d_model: int, layer: int) -> int:
        """Returns the FLOPs of one token, 2 per multiply-add, without those of linear layers (nn.Linear)."""
        return 0

    def require(self, layers: Sequence[int]) -> None:
        """Raises ValueError where this feed-forward does not fit a model in which these layers have it."""

    def why_not_context_parallel(self) -> str | None:
        """Returns why ranks cannot hold a row in slices, with the remedy; None where no token depends on another."""
        return None

    def exchanged_activations(self, d_model: int, layer: int, n: int) -> Activations:
        """Returns what autograd saves of one token in addition where n ranks hold the matrices in slices: the other ranks' tokens."""
        return Activations(0, (n - 1) * d_model)

    def why_not_tensor_parallel(self, d_model: int, n: int) -> str | None:
        """Returns why n ranks cannot hold the matrices in slices, with the remedy; None where they can."""
        return f"ffn={self.kind} has matrices that no rank can hold a slice of. Use ffn=mlp"

    def implied(self, d_model: int) -> Tree:
        """Returns what options that are null stand for."""
        return {}


class Mixture(Declares, nn.Module):
    """A feed-forward that sends each token to some of its experts, and reports losses and loads of these to the context."""

    @abstractmethod
    def idle(self) -> int:
        """Returns how many weights are not used for a token."""

    @abstractmethod
    def balance(self, load: Tensor) -> None:
        """Updates the layer's `self_updated` parameters.  load: (e,), tokens of each expert in a whole optimizer step."""
