"""How the outputs of layers reach the layers above: along one residual stream, along several, by ways around the layers between, or by the
same layers again."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from lm.nn.activation_memory import Activations
from lm.nn.init import Declares, Initializer, ones, zeros
from lm.nn.norm import NormConfig, PreNorm
from lm.schema import MOST_LAYERS, Slot

LayerFn = Callable[[Tensor], Tensor]
"""A block, with all that it reads beside its input."""


class ResidualConfig(Slot, group="model/residual"):
    """What carries tokens from the embedding through the layers."""

    @abstractmethod
    def build(self, d_model: int, n_layers: int) -> "Residual":
        """Returns a module that is called with the embedded tokens, (b, s, d), and the layers."""

    def passes(self) -> int:
        """Returns how many times a token goes through all layers."""
        return 1

    def connect(self, sublayer: PreNorm, d_model: int, nth: int) -> nn.Module:
        """Returns the residual connection of the nth sublayer of a stack, given that of a single stream."""
        return sublayer

    def require(self, norm: NormConfig, block: str, drafts: bool, n_layers: int) -> None:
        """Raises ValueError where the norm's place, this kind of block, or blocks beyond the last layer do not fit a stack of so many
        layers, or these are too few."""

    def width(self, d_model: int) -> int:
        """Returns how many numbers of a token one layer hands to the next."""
        return d_model

    def saved_activations(self, d_model: int, sublayers: int) -> Activations:
        """Returns what autograd saves of one token in a block, beside what a single stream keeps."""
        return Activations(0, 0)

    def saved_between_blocks(self, d_model: int, n_layers: int) -> Activations:
        """Returns what autograd saves of one token outside of the blocks."""
        return Activations(0, 0)

    def flops(self, d_model: int, n_layers: int, sublayers: int) -> int:
        """Returns the FLOPs of one token in a stack, beside those of the blocks.  sublayers: of a block."""
        return 0


class PlainConfig(ResidualConfig):
    """One stream, to which each sublayer adds."""

    kind: Literal["plain"] = "plain"

    def build(self, d_model: int, n_layers: int) -> "Residual":
        return Residual()


class FirstConfig(ResidualConfig):
    """Each layer reads a x + b x0: x0 is the embedding; a and b are learned numbers of each layer (modded-nanogpt, nanochat)."""

    kind: Literal["x0"] = "x0"

    def build(self, d_model: int, n_layers: int) -> "Residual":
        return FirstResidual(n_layers)

    def saved_between_blocks(self, d_model: int, n_layers: int) -> Activations:
        return Activations(n_layers * d_model, 0)


class UNetConfig(ResidualConfig):
    """Each layer of the upper half reads in addition the output of one of the lower half, by a learned factor (U-ViT, arXiv:2209.12152;
    modded-nanogpt)."""

    kind: Literal["unet"] = "unet"

    def build(self, d_model: int, n_layers: int) -> "Residual":
        return UNetResidual(n_layers)

    def require(self, norm: NormConfig, block: str, drafts: bool, n_layers: int) -> None:
        if n_layers < 2:
            rule = "residual=unet joins an upper layer with a lower one, and a stack of one layer has none"
            raise ValueError(f"{rule}. Give it more, or set residual=plain.")

    def saved_between_blocks(self, d_model: int, n_layers: int) -> Activations:
        return Activations(0 if n_layers % 2 else d_model, 0)  # the other outputs are the inputs of the layers above them


class DenseConfig(ResidualConfig):
    """Each layer reads a learned sum of the embedding and the outputs of all layers below (DenseFormer, arXiv:2402.02622)."""

    kind: Literal["dense"] = "dense"

    def build(self, d_model: int, n_layers: int) -> "Residual":
        return DenseResidual(n_layers)

    def saved_between_blocks(self, d_model: int, n_layers: int) -> Activations:
        return Activations(n_layers * d_model, 0)


class LoopConfig(ResidualConfig):
    """All layers, one behind the other, several times over, with the same weights (Universal Transformer, arXiv:1807.03819; ALBERT,
    arXiv:1909.11942: one layer, 12 times; looped language models, arXiv:2510.25741)."""

    kind: Literal["loop"] = "loop"
    times: int = Field(2, gt=1, le=MOST_LAYERS)
    """Times that a token goes through them (Ouro: 4); each time has keys and values of its own."""

    def build(self, d_model: int, n_layers: int) -> "Residual":
        return Residual()

    def passes(self) -> int:
        return self.times

    def require(self, norm: NormConfig, block: str, drafts: bool, n_layers: int) -> None:
        if drafts:
            raise ValueError("mtp drafts behind layers that run once, and residual=loop runs them again. Set mtp=null, or residual=plain.")


class Residual(nn.Module):
    """x = layer(x)."""

    def forward(self, x: Tensor, layers: Sequence[LayerFn]) -> Tensor:
        """(b, s, d) -> (b, s, d).  layers: in the order in which a token goes through them."""
        for layer in layers:
            x = layer(x)
        return x


class FirstResidual(Declares, Residual):
    """x = layer(a x + b x0); a is 1 and b is 0 at first."""

    initializers = {"keep": ones, "first": zeros}

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.keep, self.first = nn.Parameter(torch.empty(n_layers)), nn.Parameter(torch.empty(n_layers))

    def forward(self, x: Tensor, layers: Sequence[LayerFn]) -> Tensor:
        x0 = x
        for layer, a, b in zip(layers, self.keep, self.first, strict=True):
            x = layer(a * x + b * x0)
        return x


class UNetResidual(Declares, Residual):
    """x = layer(x + w y); y is the output of the layer as far from the first as this one is from the last, and w is 1 at first."""

    initializers = {"skip": ones}

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.skip = nn.Parameter(torch.empty(n_layers // 2))

    def forward(self, x: Tensor, layers: Sequence[LayerFn]) -> Tensor:
        half, lower = len(self.skip), list[Tensor]()
        for layer in layers[:half]:
            x = layer(x)
            lower.append(x)
        for layer in layers[half : len(layers) - half]:
            x = layer(x)
        for layer, w in zip(layers[len(layers) - half :], self.skip, strict=True):
            x = layer(x + w * lower.pop())
        return x


class DenseResidual(Declares, Residual):
    """y_i = layer_i(x_i) and x_(i+1) = sum of w_ij y_j over j <= i, y_0 the embedding; w_ii is 1 at first, the others 0."""

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.sizes = [i + 2 for i in range(n_layers)]
        self.shares = nn.Parameter(torch.empty(sum(self.sizes)))

    def named_initializers(self) -> Mapping[str, Initializer]:
        newest = torch.tensor(self.sizes).cumsum(0) - 1
        return {"shares": lambda shape, init: torch.zeros(shape).index_fill(0, newest, 1.0)}

    def forward(self, x: Tensor, layers: Sequence[LayerFn]) -> Tensor:
        outputs = [x]
        for layer, shares in zip(layers, self.shares.split(self.sizes), strict=True):
            outputs.append(layer(x))
            x = shares[0] * outputs[0]
            for share, y in zip(shares[1:], outputs[1:], strict=True):
                x = x + share * y
        return x
