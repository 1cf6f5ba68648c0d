"""Adapters: a few weights that are trained beside the weights of a parent, which are frozen."""

import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from lm.adapters.held import HELD, Base
from lm.adapters.lowrank import A, B, LoRAExperts, LoRAOnHeld, M, beside, lengths, of_lengths
from lm.nn.ffn.experts import Experts
from lm.nn.init import Declares
from lm.nn.linear import PLAIN, AskedLinear
from lm.nn.transformer import LM, build_model
from lm.schema import MOST, Slot
from lm.spelling import means

SLOTS = ("attention", "cross", "recurrent", "ffn")
"""Parts of a block that hold matrices."""
_IN_BLOCK = re.compile(r"\b(blocks|mtp)\.\d+\.")
_PLAIN = (*PLAIN, AskedLinear)  # classes whose forward is known; a router, which chooses experts, has another


class AdapterConfig(Slot, group="adapter"):
    """What is trained in place of the weights of `init_from`, and saved without them."""

    @abstractmethod
    def apply(self, model: LM) -> None:
        """Puts the adapter into the model, whose other weights are frozen.  Raises ValueError where it does not fit."""

    def own(self, model: LM) -> dict[str, nn.Parameter]:
        """Returns by name what is trained and saved, of a model that has the adapter: its own parameters, and any others that it trains."""
        return adapting(model)

    def keeps_parent(self) -> bool:
        """Whether the model without it is the parent still, all of whose weights stay as they are."""
        return False

    @abstractmethod
    def round(self, weights: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Changes a parent's weights to those that the adapter is trained beside, such as rounded ones.  own: the adapter's weights."""

    @abstractmethod
    def merge(self, weights: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Adds the adapter's weights to a parent's, so that the bare model computes the same."""


def hold_bases(module: nn.Module) -> None:
    """Rounds the parent's matrices within a module, once they are read, where the adapter is trained beside rounded ones."""
    for each in module.modules():
        if isinstance(each, LoRAOnHeld):
            each.hold()


def n_weights(module: nn.Module) -> int:
    """Returns how many weights a module has; of matrices in 4 bits, two of them are one element."""
    packed = sum(each.weight.numel() * (each.held.packed - 1) for each in module.modules() if isinstance(each, LoRAOnHeld) and each.is_held)
    return sum(p.numel() for p in module.parameters()) + packed


def round_beside(model: LM, adapter: AdapterConfig) -> None:
    """Changes the weights of a parent to those that the adapter is trained beside."""
    adapted, weights = build_model(model.cfg, device="meta"), {name: p.data for name, p in model.named_parameters()}
    adapter.apply(adapted)
    adapter.round(weights, adapting(adapted))
    for name, p in model.named_parameters():
        p.data = weights[name]


def adapting(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns by name the adapter's parameters, which the parent does not have."""
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
    dora: bool = False
    """Each output's row of the sum has a length of its own, m, that is learned too: m (W + scale B A) / |W + scale B A| (DoRA, Liu et al.
    2024, arXiv:2402.09353)."""
    base: Base = "saved"
    """How the frozen matrices beside which it is trained are held: in the precision of the training (saved), in bf16, which changes nothing
    of weights that were published so, in int8 with a scale for each output, or in 4 bits with a scale for each 64 inputs (nf4, of QLoRA:
    Dettmers et al. 2023, arXiv:2305.14314). Stacked experts stay as they are."""
    targets: list[str] | None = Field(None, min_length=1)
    """Matrices by slots or patterns: attention, ffn, experts, attention.q, blocks.0.*; or, where that means none in the blocks, those
    beside them: head.dense. null: all of the blocks of at least such a rank."""
    whole: list[str] = []
    """Weights that are trained whole, by patterns or parts of names: embed, head, norm. They get no adapter, and are saved with it (peft's
    modules_to_save)."""

    def keeps_parent(self) -> bool:
        return not self.whole

    @property
    def scale(self) -> float:
        """Returns the factor on B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def apply(self, model: LM) -> None:
        known, whole = dict(_matrices(model)), self._whole(model)
        meant = {target: _meant(target, known) for target in self.targets or SLOTS}
        for target in self.targets or ():
            if not meant[target]:
                names = dict.fromkeys(re.sub(r".*\bblocks\.\d+\.", "", path) for path in known)
                raise ValueError(f"adapter.targets names '{target}', and no matrix is called so. There are {', '.join(names)}.")
        found = {path: shape for path, shape in known.items() if any(path in paths for paths in meant.values())}
        found = {path: shape for path, shape in found.items() if not {path, f"{path}.weight"} & whole}
        if not found:
            raise ValueError("adapter.whole names all matrices of adapter.targets, so that nothing is of low rank. Set adapter=null.")
        self._leave_out_narrow(found)
        if self.dora and (stacked := next((path for path, shape in found.items() if len(shape) > 2), None)) is not None:
            raise ValueError(
                f"adapter.dora has no form for stacked experts, as {stacked} are, and peft has none. Name others in adapter.targets, or"
                " set adapter.dora=false."
            )
        if self.base != "saved":
            self._require_groups(found)
        model.requires_grad_(False)
        for path, module in _holders(model):
            mine = [name for name in _own_matrices(module) if f"{path}.{name}".removesuffix(".weight") in found]
            if mine:
                given = (self.rank, self.scale, self.dropout)
                if isinstance(module, nn.Linear):
                    model.set_submodule(path, beside(module, self.base, self.dora, *given))
                else:
                    model.set_submodule(path, LoRAExperts(module, mine, *given))
        for name, p in model.named_parameters():
            if name in whole:
                p.requires_grad_(True)

    def own(self, model: LM) -> dict[str, nn.Parameter]:
        whole = self._whole(model)
        return adapting(model) | {name: p for name, p in model.named_parameters() if name in whole}

    def _whole(self, model: LM) -> set[str]:
        """Returns the names of the weights that are trained whole. Raises ValueError for a pattern that means none."""
        others = adapting(model).keys() | model.self_updated().keys()
        names = [name for name, _ in model.named_parameters() if name not in others]
        for pattern in self.whole:
            if not any(means(pattern, name) for name in names):
                near = ", ".join(get_close_matches(pattern, names, 5, 0))
                tied = " The head is the embedding here." if model.cfg.head.tied and "head" in pattern else ""
                raise ValueError(f"adapter.whole names '{pattern}', and no weight is called so.{tied} Near are {near}.")
        return {name for name in names if any(means(pattern, name) for pattern in self.whole)}

    def _leave_out_narrow(self, found: dict[str, torch.Size]) -> None:
        """Deletes matrices narrower than the rank from `found`. Raises ValueError where targets name them, or none would be left."""
        narrow = {path: shape for path, shape in found.items() if min(shape[-2:]) < self.rank}
        if narrow and (self.targets is not None or narrow.keys() == found.keys()):
            path, (rows, columns) = next((path, shape[-2:]) for path, shape in narrow.items())
            raise ValueError(
                f"adapter.rank={self.rank} is over the rank of {path}, which is {columns} -> {rows}. Set adapter.rank="
                f"{min(rows, columns)} or less, or leave it out of adapter.targets."
            )
        for path in narrow:
            del found[path]

    def _require_groups(self, found: Mapping[str, torch.Size]) -> None:
        """Raises ValueError where a matrix cannot be held so."""
        group = HELD[self.base].group
        for path, shape in found.items():
            if len(shape) == 2 and shape[1] % group:
                raise ValueError(
                    f"adapter.base={self.base} holds {group} inputs together, and {path} has {shape[1]}. Leave it out of adapter.targets,"
                    " or set adapter.base=int8."
                )

    def merge(self, weights: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """In float32: (out, in) + (out, r) (r, in), or the same with experts in front. What was trained whole takes its place."""
        self.round(weights, own)
        weights |= self.whole_of(own)
        for name, a, b in self.low(own):
            merged = weights[name].float() + self.scale * (b.float() @ a.float())
            if self.dora:
                merged = of_lengths(merged, self.magnitude(name, weights, own))
            weights[name] = merged.to(weights[name].dtype)

    def whole_of(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns those of the adapter's weights that were trained whole."""
        return {name: weight for name, weight in own.items() if not name.endswith((A, B, M))}

    def magnitude(self, name: str, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Tensor:
        """Returns DoRA's m, (out,); for a matrix without an adapter, the lengths of its rows."""
        grown = own.get(name.removesuffix("weight") + M)
        return lengths(weights[name]) if grown is None else lengths(weights[name]) + grown.float()

    def round(self, weights: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
        if self.base == "saved":
            return
        for name in [name for name, _, _ in self.low(own) if weights[name].ndim == 2]:
            weights[name] = HELD[self.base].whole(*HELD[self.base].pack(weights[name])).to(weights[name].dtype)

    def low(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields the name of each matrix that has an adapter, A, and B."""
        for stem in (name.removesuffix(A) for name in own if name.endswith(A)):
            yield stem + "weight" if stem.endswith(".") else stem.removesuffix("_"), own[stem + A], own[stem + B]


def _holders(model: LM) -> Iterator[tuple[str, nn.Linear | Experts]]:
    """Yields names and modules that hold matrices; a head, which chooses among tokens, has another forward."""
    for path, module in [*model.named_modules()]:
        if isinstance(module, Experts) or (isinstance(module, nn.Linear) and type(module) in _PLAIN):
            yield path, module


def _meant(target: str, known: Iterable[str]) -> list[str]:
    """Returns the names that a target means: those in blocks, or, where it means none of them, those beside the blocks."""
    found = [path for path in known if means(target, path)]
    return [path for path in found if _IN_BLOCK.search(path)] or found


def _own_matrices(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters(recurse=False) if p.ndim > 1 and "bias" not in name]


def _matrices(model: LM) -> Iterator[tuple[str, torch.Size]]:
    """Yields names and shapes of all matrices of more than one row. A matrix is named after its module or, where a module has several
    (experts), after its own name in it too."""
    for path, module in _holders(model):
        for name in _own_matrices(module):
            if (shape := module.get_parameter(name).shape)[-2] > 1:
                yield f"{path}.{name}".removesuffix(".weight"), shape
