"""Modules in which a few weights are trained beside frozen matrices."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.adapters.held import HELD, Base, Held, multiplied
from lm.nn.ffn.experts import Experts
from lm.nn.init import Declares, InitContext, zeros
from lm.nn.linear import AskedLinear
from lm.ops.experts import by_expert
from lm.ops.linear import product
from lm.ops.precision import wide_dtype, without_autocast

A, B, M = "lora_a", "lora_b", "lora_m"
_LEAST = 1e-12  # the least divisor: a row of zeros stays one


def lengths(matrix: Tensor) -> Tensor:
    """(out,) the L2 norm of each output's row, in float32 or wider."""
    return torch.linalg.vector_norm(matrix, dim=1, dtype=wide_dtype(matrix))


def of_lengths(matrix: Tensor, wanted: Tensor) -> Tensor:
    """Returns the matrix with its rows scaled to these lengths, (out,)."""
    return matrix * (wanted / lengths(matrix).clamp_min(_LEAST)).unsqueeze(1)


def _inwards(shape: torch.Size, init: InitContext) -> Tensor:
    """N(0, 1 / (3 inputs)), of the same variance as in the code of Hu et al., which draws uniform numbers as torch's linear layers do."""
    return init.normal(shape, 1 / math.sqrt(3 * shape[-1]))


class LoRALinear(Declares, AskedLinear):
    """W x + b + scale B A dropout(x).  A: (r, in); B: (out, r), which starts as 0."""

    initializers = {A: _inwards, B: zeros}
    adapting: ClassVar[tuple[str, ...]] = (A, B)

    def __init__(self, base: nn.Linear, rank: int, scale: float, dropout: float) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias, self.scale = base.weight, base.bias, scale
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_empty(base.out_features, rank))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out = self.of_parent(x, self.bias)
        return out if self.silent else out + self.low(x)

    def low(self, x: Tensor) -> Tensor:
        """scale B A dropout(x)."""
        return self.scale * F.linear(F.linear(self.dropout(x), self.lora_a), self.lora_b)

    def of_parent(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """W x + bias, with the frozen W."""
        return product(x, self.weight, bias)

    def lengths(self) -> Tensor:
        """(out,) the lengths of the rows of W."""
        return lengths(self.weight)

    def matrix(self) -> Tensor:
        return self.weight if self.silent else self.weight + self.scale * (self.lora_b @ self.lora_a)


class LoRAOnHeld(LoRALinear):
    """LoRALinear with W in fewer bits, once it has been read; each product makes it again, in the backward too."""

    held: Held
    scales: Tensor

    def __init__(self, base: nn.Linear, rank: int, scale: float, dropout: float, held: Held) -> None:
        super().__init__(base, rank, scale, dropout)
        self.held = held
        self.register_buffer("scales", base.weight.new_empty(0, dtype=torch.bfloat16), persistent=False)
        self.is_held = False

    def hold(self) -> None:
        """Rounds W, once."""
        if not self.is_held:
            stored, self.scales = self.held.pack(self.weight.detach())
            self.weight, self.is_held = nn.Parameter(stored, requires_grad=False), True

    def of_parent(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not self.is_held:
            return super().of_parent(x, bias)
        out = multiplied(x, self.weight, self.scales, self.held)
        return out if bias is None else out + bias

    def lengths(self) -> Tensor:
        if not self.is_held:
            return super().lengths()
        found = torch.cat([lengths(part) for part in self.held.pieces(self.weight, self.scales, torch.float32, 0)])
        return found * self.scales if self.held.by_row else found

    def matrix(self) -> Tensor:
        whole = (self.held.whole(self.weight, self.scales) if self.is_held else self.weight).to(self.lora_a.dtype)
        return whole if self.silent else whole + self.scale * (self.lora_b @ self.lora_a)


class DoRALinear(LoRALinear):
    """m (W + scale B A) x / |W + scale B A| + b, where |.| are lengths of rows and m = |W| + `lora_m`. To learn the difference is as
    good as to learn m, and it starts as 0. No gradient goes through the divisor (section 4.3)."""

    initializers = {**LoRALinear.initializers, M: zeros}
    adapting = (A, B, M)

    def __init__(self, base: nn.Linear, rank: int, scale: float, dropout: float) -> None:
        super().__init__(base, rank, scale, dropout)
        self.lora_m = nn.Parameter(base.weight.new_empty(base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        if self.silent:
            return self.of_parent(x, self.bias)
        out = self.of_parent(x, None) + self.low(x)
        out = out * self.gain().to(out.dtype)
        return out if self.bias is None else out + self.bias

    def gain(self) -> Tensor:
        """(out,) m / |W + scale B A|, by |W|^2 + 2 scale <W A^T, B> + scale^2 <B A A^T, B>, without another matrix of the size of W."""
        with torch.no_grad(), without_autocast(self.weight.device):
            a, b, length = self.lora_a, self.lora_b, self.lengths()
            across = 2 * self.of_parent(a, None).mT + self.scale * (b @ (a @ a.mT))  # (r, out) -> (out, r)
            divisor = (length.square() + self.scale * (b * across).sum(1)).clamp_min(_LEAST**2).sqrt()
        return (length + self.lora_m) / divisor

    def matrix(self) -> Tensor:
        return super().matrix() if self.silent else self.gain().unsqueeze(1) * super().matrix()


class DoRAOnHeld(DoRALinear, LoRAOnHeld):
    """DoRALinear with W in fewer bits."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, dropout: float, held: Held) -> None:
        LoRAOnHeld.__init__(self, base, rank, scale, dropout, held)
        self.lora_m = nn.Parameter(base.weight.new_empty(base.out_features))


def beside(linear: nn.Linear, base: Base, dora: bool, rank: int, scale: float, dropout: float) -> LoRALinear:
    """Returns the layer with an adapter beside its matrix, which is held as `base` says once it has been read."""
    if base == "saved":
        return (DoRALinear if dora else LoRALinear)(linear, rank, scale, dropout)
    return (DoRAOnHeld if dora else LoRAOnHeld)(linear, rank, scale, dropout, HELD[base])


class LoRAExperts(Experts):
    """LoRA for each expert of an MoE layer.  A: (e, r, in); B: (e, out, r)."""

    adapting = tuple(f"{name}_{part}" for name in Experts.initializers for part in (A, B))
    initializers = {**Experts.initializers} | {name: _inwards if name.endswith(A) else zeros for name in adapting}

    def __init__(self, base: Experts, names: list[str], rank: int, scale: float, dropout: float) -> None:
        """names: of the matrices that are adapted."""
        with torch.device("meta"):
            super().__init__(base.cfg, base.n, base.d_model, base.reference)
        self.scale, self.low_dropout, self.names = scale, nn.Dropout(dropout), tuple(names)
        for name, p in base.named_parameters(recurse=False):
            self.register_parameter(name, p)
        for name in names:
            weight = base.get_parameter(name)
            e, rows, columns = weight.shape
            self.register_parameter(f"{name}_{A}", nn.Parameter(weight.new_empty(e, rank, columns)))
            self.register_parameter(f"{name}_{B}", nn.Parameter(weight.new_empty(e, rows, rank)))

    def of_one(self, name: str, x: Tensor, i: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = super().of_one(name, x, i, weight, bias)
        if self.silent or name not in self.names:
            return out
        a, b = (self.get_parameter(f"{name}_{part}")[i] for part in (A, B))
        return out + self.scale * F.linear(F.linear(self.low_dropout(x), a), b)

    def of_all(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, chosen: Tensor) -> Tensor:
        out = super().of_all(name, x, weight, bias, ends, chosen)
        if self.silent or name not in self.names:
            return out
        a, b = (self.get_parameter(f"{name}_{part}") for part in (A, B))
        return out + self.scale * by_expert(by_expert(self.low_dropout(x), a, None, ends, chosen), b, None, ends, chosen)
