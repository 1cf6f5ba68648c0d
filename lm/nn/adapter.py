"""Adapters: a few weights that are trained beside those of a parent, which stay as they are."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.ffn.experts import Experts, by_expert
from lm.nn.init import Declares, Draw, Start, zeros
from lm.nn.linear import Linear, Out, int8_rows, of_int8_rows
from lm.nn.transformer import LM
from lm.schema import MOST, Slot
from lm.spelling import means

SLOTS = ("attention", "cross", "recurrent", "ffn")
"""Parts of a block that hold matrices."""
_PIECE = 1 << 18  # elements of a matrix in int8 that are wide at a time: larger ones leave holes in the heap
_PLAIN = (nn.Linear, Linear, Out)  # of which the forward is known; a router's, which decides who computes, is another


class AdapterConfig(Slot, group="adapter"):
    """What is trained in place of the weights of `init_from`, and saved without them."""

    @abstractmethod
    def apply(self, model: LM) -> None:
        """Puts the adapter into the model, whose other weights are frozen.  Raises ValueError where it does not fit."""

    @abstractmethod
    def round(self, weights: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Makes of a parent's weights those that the adapter is trained beside.  own: the weights of the adapter."""

    @abstractmethod
    def merge(self, weights: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Writes into a parent's weights what the adapter's own add to them, so that the bare model computes the same."""


def hold(module: nn.Module) -> None:
    """Brings all matrices within that a parent's weights have been read into to the form in which the adapter is trained beside them."""
    for each in module.modules():
        if isinstance(each, LoRAOnInt8):
            each.hold()


def adapting(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns by name the parameters of an adapter, which the parent does not have."""
    own = {at: module.adapting for at, module in model.named_modules() if isinstance(module, Declares)}
    return {name: p for name, p in model.named_parameters() if name.rpartition(".")[2] in own.get(name.rpartition(".")[0], ())}


class LoRAConfig(AdapterConfig):
    """W + scale B A in place of each matrix W, B and A of low rank (Hu et al. 2021, arXiv:2106.09685)."""

    kind: Literal["lora"] = "lora"
    rank: int = Field(8, gt=0, le=MOST)
    """Inner width r of B A."""
    alpha: float = Field(16.0, gt=0)
    """The scale is alpha / r."""
    rslora: bool = False
    """The scale is alpha / sqrt(r), so that a rate fits more ranks (Kalajdzievski 2023, arXiv:2312.03732)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an element of what A reads."""
    base: Literal["saved", "int8"] = "saved"
    """How the frozen matrices beside which it is trained are held: as they are saved, or in int8 with a scale for each output (as QLoRA,
    Dettmers et al. 2023, arXiv:2305.14314, which has 4 bits). Stacked experts stay as they are."""
    targets: list[str] | None = Field(None, min_length=1)
    """Matrices by slots or patterns: attention, ffn, experts, attention.q, blocks.0.*. null: all of at least such a rank."""

    @property
    def scale(self) -> float:
        """Returns the factor on B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def apply(self, model: LM) -> None:
        known = dict(_matrices(model))
        found = {path: shape for path, shape in known.items() if any(means(target, path) for target in self.targets or SLOTS)}
        for target in self.targets or ():
            if not any(means(target, path) for path in found):
                names = dict.fromkeys(path.split("blocks.")[-1].partition(".")[2] for path in known)
                raise ValueError(f"adapter.targets names '{target}', and no matrix is called so. There are {', '.join(names)}.")
        self._leave_out_narrow(found)
        model.requires_grad_(False)
        for path, module in _holders(model):
            mine = [name for name in _own_matrices(module) if f"{path}.{name}".removesuffix(".weight") in found]
            if mine:
                linear = LoRALinear if self.base == "saved" else LoRAOnInt8
                model.set_submodule(path, linear(module, self) if isinstance(module, nn.Linear) else LoRAExperts(module, self, mine))

    def _leave_out_narrow(self, found: dict[str, torch.Size]) -> None:
        """Matrices with fewer inputs or outputs than the rank, where no target names them; ValueError otherwise, or where none is left."""
        narrow = {path: shape for path, shape in found.items() if min(shape[-2:]) < self.rank}
        if narrow and (self.targets is not None or narrow.keys() == found.keys()):
            path, (rows, columns) = next((path, shape[-2:]) for path, shape in narrow.items())
            raise ValueError(
                f"adapter.rank={self.rank} is over the rank of {path}, which is {columns} -> {rows}. Set adapter.rank="
                f"{min(rows, columns)} or less, or leave it out of adapter.targets."
            )
        for path in narrow:
            del found[path]

    def merge(self, weights: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """In float32: (out, in) + (out, r) (r, in), or the same with experts in front."""
        self.round(weights, own)
        for name, a, b in self.low(own):
            weights[name] = (weights[name].float() + self.scale * (b.float() @ a.float())).to(weights[name].dtype)

    def round(self, weights: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
        for name in [name for name, _, _ in self.low(own) if self.base == "int8" and weights[name].ndim == 2]:
            weights[name] = of_int8_rows(*int8_rows(weights[name])).to(weights[name].dtype)

    def low(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields the name of each matrix that has an adapter, A, and B."""
        for stem in (name.removesuffix(_A) for name in own if name.endswith(_A)):
            yield stem + "weight" if stem.endswith(".") else stem.removesuffix("_"), own[stem + _A], own[stem + _B]


_A, _B = "lora_a", "lora_b"


def _inwards(shape: torch.Size, start: Start) -> Tensor:
    """N(0, 1 / 3 inputs), which has the variance of Hu's own code: the uniform numbers of torch's linear layers."""
    return start.normal(shape, 1 / math.sqrt(3 * shape[-1]))


class LoRALinear(Declares, Linear):
    """W x + b + scale B A dropout(x).  A: (r, in); B: (out, r), which starts as 0."""

    drawn: ClassVar[Mapping[str, Draw]] = {_A: _inwards, _B: zeros}
    adapting: ClassVar[tuple[str, ...]] = (_A, _B)

    def __init__(self, base: nn.Linear, cfg: LoRAConfig) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias, self.scale = base.weight, base.bias, cfg.scale
        self.lora_a = nn.Parameter(base.weight.new_empty(cfg.rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_empty(base.out_features, cfg.rank))
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.linear(self.dropout(x), self.lora_a), self.lora_b)
        return self.of_parent(x) + self.scale * low

    def of_parent(self, x: Tensor) -> Tensor:
        """W x + b."""
        return F.linear(x, self.weight, self.bias)

    def matrix(self) -> Tensor:
        return self.weight + self.scale * (self.lora_b @ self.lora_a)


class LoRAOnInt8(LoRALinear):
    """The same with W in int8 from when it has been read on; a product makes it wide again, in the backward too."""

    rows: Tensor
    """(out,) the scale of each output."""

    def __init__(self, base: nn.Linear, cfg: LoRAConfig) -> None:
        super().__init__(base, cfg)
        self.register_buffer("rows", base.weight.new_empty(base.out_features, dtype=torch.bfloat16), persistent=False)

    def hold(self) -> None:
        """Rounds W, once."""
        if self.weight.dtype != torch.int8:
            q, self.rows = int8_rows(self.weight.detach())
            self.weight = nn.Parameter(q, requires_grad=False)

    def of_parent(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        out: Tensor = _OfInt8.apply(x, self.weight, self.rows)
        return out if self.bias is None else out + self.bias

    def matrix(self) -> Tensor:
        return of_int8_rows(self.weight, self.rows).to(self.lora_a.dtype) + self.scale * (self.lora_b @ self.lora_a)


class _OfInt8(torch.autograd.Function):
    """x W^T = scale (x q^T), of which autograd would keep W in the dtype of x until the backward; a piece of q is wide at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, q: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(q, rows)
        return torch.cat([F.linear(x, part.to(x.dtype)) for part in q.split(max(1, _PIECE // q.shape[1]))], -1).mul_(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        q, rows = ctx.saved_tensors
        scaled = gradient * rows
        return torch.cat([scaled @ part.to(gradient.dtype) for part in q.split(max(1, _PIECE // len(q)), 1)], -1), None, None


class LoRAExperts(Experts):
    """The same for each expert.  A: (e, r, in); B: (e, out, r)."""

    adapting: ClassVar[tuple[str, ...]] = tuple(f"{name}_{part}" for name in Experts.drawn for part in (_A, _B))
    drawn: ClassVar[Mapping[str, Draw]] = {**Experts.drawn} | {name: _inwards if name.endswith(_A) else zeros for name in adapting}

    def __init__(self, base: Experts, cfg: LoRAConfig, names: list[str]) -> None:
        """names: of the matrices that are adapted."""
        with torch.device("meta"):
            super().__init__(base.cfg, base.n, base.d_model, base.reference)
        self.scale, self.low_dropout, self.names = cfg.scale, nn.Dropout(cfg.dropout), tuple(names)
        for name, p in base.named_parameters(recurse=False):
            self.register_parameter(name, p)
        for name in names:
            weight = base.get_parameter(name)
            e, rows, columns = weight.shape
            self.register_parameter(f"{name}_{_A}", nn.Parameter(weight.new_empty(e, cfg.rank, columns)))
            self.register_parameter(f"{name}_{_B}", nn.Parameter(weight.new_empty(e, rows, cfg.rank)))

    def of_one(self, name: str, x: Tensor, i: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = super().of_one(name, x, i, weight, bias)
        if name not in self.names:
            return out
        a, b = (self.get_parameter(f"{name}_{part}")[i] for part in (_A, _B))
        return out + self.scale * F.linear(F.linear(self.low_dropout(x), a), b)

    def of_all(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, chosen: Tensor) -> Tensor:
        out = super().of_all(name, x, weight, bias, ends, chosen)
        if name not in self.names:
            return out
        a, b = (self.get_parameter(f"{name}_{part}") for part in (_A, _B))
        return out + self.scale * by_expert(by_expert(self.low_dropout(x), a, None, ends, chosen), b, None, ends, chosen)


def _holders(model: LM) -> Iterator[tuple[str, nn.Linear | Experts]]:
    """Names and modules within blocks that hold matrices."""
    inside = {module for unit in model.units() for module in unit.modules()}
    for path, module in [*model.named_modules()]:
        if module in inside and (isinstance(module, Experts) or (isinstance(module, nn.Linear) and type(module) in _PLAIN)):
            yield path, module


def _own_matrices(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters(recurse=False) if p.ndim > 1 and "bias" not in name]


def _matrices(model: LM) -> Iterator[tuple[str, torch.Size]]:
    """Yields names and shapes of all matrices of more than one row: the name of their module, or beside others in one, as experts' are,
    with their own."""
    for path, module in _holders(model):
        for name in _own_matrices(module):
            if (shape := module.get_parameter(name).shape)[-2] > 1:
                yield f"{path}.{name}".removesuffix(".weight"), shape
