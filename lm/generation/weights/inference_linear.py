"""Weight matrices as decoding holds them: laid out for this machine's kernels, or in fewer bits. They can only be multiplied by."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.errors import ConfigError
from lm.ops.precision import wide_dtype


def by_hand(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear of one row as a product and a sum over a matrix of any dtype, with sums in float32 at least. A compiler fuses it with the
    operations before and behind, and converts the matrix as it reads it; on a GPU, where all outputs read the row, the row too."""
    given, wide = x.dtype, wide_dtype(x)
    x = x.to(wide) if x.is_cpu else x
    row = torch.as_strided(x, (1, x.numel()), (x.numel(), 1))  # else a compiler computes the row anew for every output
    out = (row.to(wide) * weight.to(wide)).sum(-1)
    return out.to(given).view(*x.shape[:-1], -1)


class InferenceLinear(nn.Module):
    """x W^T + b, in the dtype of x."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: (out, in); bias: (out,)."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias, self.takes = bias, weight.dtype

    @classmethod
    def fits(cls, weight: Tensor) -> bool:
        """Returns whether this machine can hold this matrix in this way."""
        return True

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and x.numel() == self.in_features and (found := self.row(x)) is not None:
            return found if self.bias is None else found + self.bias
        same = x.dtype is self.takes  # a cast that changes nothing costs as much as a small operation
        out = self.product(x) if same else self.product(x.to(self.takes)).to(x.dtype)
        return out if self.bias is None else out + self.bias

    __call__ = forward  # nothing hooks in here, and a step of a small model is calls for the most part

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """(.., in) -> (.., out)."""

    def row(self, x: Tensor) -> Tensor | None:
        """The product of one row in a compiled step; None: as in any other step.  (.., in) -> (.., out), in the dtype of x."""
        return None

    @abstractmethod
    def matrix(self) -> Tensor:
        """Returns W as it is held, (out, in), in float32 or the dtype it was given in."""

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}"

    def train(self, mode: bool = True) -> Self:
        if mode:
            raise ConfigError("model: its weights are held for decoding, and cannot be trained. Load it without dtype.")
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Raises ConfigError; every move and cast of a module passes through here."""
        raise ConfigError("model: its weights are held for decoding where they are, as they are. Load it anew with device and dtype.")

    def _save_to_state_dict(self, destination: Mapping[str, Any], prefix: str, keep_vars: bool) -> None:
        raise ConfigError("model: its weights are held for decoding, and cannot be saved. Export the folder that they come from.")


class Plain(InferenceLinear):
    """The reference: F.linear, in the dtype of the matrix."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight = weight.contiguous()

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def row(self, x: Tensor) -> Tensor:
        return by_hand(x, self.weight)

    def matrix(self) -> Tensor:
        return self.weight


class OneDNN(InferenceLinear):
    """The matrix in the blocked layout of oneDNN's kernels. They spread the product of one row over all cores, which MKL's does on Intel
    only (pytorch/pytorch#96643), and read bfloat16 as fast as memory brings it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.blocks = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), 1)
        self.multiply = torch.ops.mkldnn._linear_pointwise.default

    @classmethod
    def fits(cls, weight: Tensor) -> bool:
        """Returns whether oneDNN's kernels are here for this matrix; those for bfloat16 want AVX-512."""
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def product(self, x: Tensor) -> Tensor:
        out: Tensor = self.multiply(x, self.blocks, None, "none", [], "")
        return out

    def matrix(self) -> Tensor:
        return self.blocks.to_dense()


class Twice(OneDNN, Plain):
    """The matrix in oneDNN's layout, and once more as it was, which a compiled step reads."""

    matrix = Plain.matrix
