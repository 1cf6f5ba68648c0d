"""How a cache stores the numbers of a token: in the model's dtype, or in fewer bits."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Exact:
    """Numbers in the model's dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def empty(self, *shape: int, device: torch.device) -> list[Tensor]:
        """Returns the tensors that keep (b, heads, n, dim) numbers."""
        return [torch.zeros(shape, device=device, dtype=self.dtype)]

    def pack(self, x: Tensor) -> list[Tensor]:
        """Returns (b, heads, s, dim) numbers in the form of the tensors of `empty`."""
        return [x]

    def unpack(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns (b, heads, k, dim) numbers in the model's dtype."""
        return parts[0]


class BFloat16(Exact):
    """16 bits a number."""

    def empty(self, *shape: int, device: torch.device) -> list[Tensor]:
        return [torch.zeros(shape, device=device, dtype=torch.bfloat16)]

    def pack(self, x: Tensor) -> list[Tensor]:
        return [x.to(torch.bfloat16)]

    def unpack(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].to(self.dtype)


class Int8(Exact):
    """Whole numbers from -127 to 127, and a scale for each head of a token."""

    def empty(self, *shape: int, device: torch.device) -> list[Tensor]:
        return [torch.zeros(shape, device=device, dtype=torch.int8), torch.zeros((*shape[:-1], 1), device=device, dtype=torch.float32)]

    def pack(self, x: Tensor) -> list[Tensor]:
        scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return [(x.float() / scale).round().to(torch.int8), scale]

    def unpack(self, parts: Sequence[Tensor]) -> Tensor:
        numbers, scale = parts
        return numbers.to(self.dtype).mul_(scale)  # a product of two dtypes would make two wide copies


FORMS: dict[str | None, type[Exact]] = {None: Exact, "bf16": BFloat16, "int8": Int8}
