"""Muon for matrices and AdamW for the rest, as one optimizer. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lm.ops.precision import multiplies_bf16
from lm.training.optim.base import (
    CUTS,
    RANKS,
    Group,
    NamedWeights,
    OptimConfig,
    Skippable,
    adam_state,
    adamw_step,
    alike,
    decaying,
    grouped,
    momentum_state,
)
from lm.training.optim.slices import Cut, Exchange, by_rows
from lm.training.optim.traits import Traits

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Iteration = Literal["quintic", "polar_express"]
_SAFETY = 1.01  # of Polar Express: bf16 rounding lifts singular values above 1, where its polynomials grow fast


def _safe(steps: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Returns the coefficients of all polynomials but the last changed such that each takes x as if it were x / _SAFETY."""
    return [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in steps[:-1]] + steps[-1:]


COEFFICIENTS: dict[Iteration, list[tuple[float, float, float]]] = {
    "quintic": [(3.4445, -4.7750, 2.0315)] * 5,
    "polar_express": _safe([
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ]),
}  # fmt: skip
"""a, b and c of x <- a x + b (x x^T) x + c (x x^T)^2 x, step by step."""


def orthogonalize(matrices: Tensor, iteration: Iteration = "quintic") -> Tensor:
    """Returns approximately U V^T for each matrix = U S V^T of the batch, in the dtype given.

    matrices: (n, rows, columns).  All matrices go through batched products, where torch.optim.Muon loops over matrices.
    """
    safety = _SAFETY if iteration == "polar_express" else 1.0
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = x / (norms * safety + 1e-7).to(x.dtype)
    for a, b, c in COEFFICIENTS[iteration]:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def even_rows(updates: Sequence[Tensor], squares: list[Tensor], beta: float) -> tuple[list[Tensor], list[Tensor]]:
    """Returns updates with rows of about equal norm, each matrix keeping its own norm, and the new means of squares.

    updates: (..., rows, columns).  squares: (..., rows, 1), running mean over steps of each row's mean square.  NorMuon, Li et al. 2025,
    arXiv:2510.05491, algorithm 1. The means begin at 0 without bias correction: that is one factor on all rows, which keeping the norm
    cancels.
    """
    updates = [x.float() for x in updates]
    squares = [of.lerp(x.square().mean(-1, keepdim=True), 1 - beta) for x, of in zip(updates, squares, strict=True)]
    even = [x / (of.sqrt() + 1e-10) for x, of in zip(updates, squares, strict=True)]
    factors = [
        x.norm(dim=(-2, -1), keepdim=True) / (y.norm(dim=(-2, -1), keepdim=True) + 1e-10) for x, y in zip(updates, even, strict=True)
    ]
    return [y * factor for y, factor in zip(even, factors, strict=True)], squares


def fast_dtype(device: torch.device) -> torch.dtype:
    """Returns bf16 where the hardware multiplies it natively (on an AVX512-BF16 core about 4 times as fast as float32), else float32."""
    return torch.bfloat16 if multiplies_bf16(device) else torch.float32


class MuonConfig(OptimConfig):
    """Muon for the blocks' matrices, AdamW for embeddings, head and vectors (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982)."""

    whole_matrices = True
    obeys_rates = True

    kind: Literal["muon"] = "muon"
    lr: float = Field(0.02, gt=0)
    """Peak learning rate of the matrices; an update has spectral norm about 1 times sqrt(max(1, rows / columns))."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Nesterov momentum of the matrices."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled decay of the matrices."""
    iteration: Iteration = "quintic"
    """How 5 steps make an update orthogonal: Jordan's quintic (singular values from 0.68 to 1.20), or Polar Express (0.88 to 1.13; Amsel et
    al. 2025, arXiv:2505.16932)."""
    cautious_decay: bool = False
    """Decay only elements that the update does not take away from 0 (Chen et al. 2025, arXiv:2510.12402)."""
    row_beta2: float | None = Field(None, ge=0, lt=1)
    """Decay of each row's mean square, by whose root the row of an update is divided, the norm of the whole kept: NorMuon, with 0.95
    (Li et al. 2025, arXiv:2510.05491). null: rows as they come."""
    adam_lr: float = Field(3e-3, gt=0)
    """Peak learning rate of everything else."""
    embed_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the embedding, also where it is the head too, and of other tables. null: adam_lr. Tokens are rare, so a
    short run gains by a rate several times that (docs/results.md); a tied embedding takes the less of it, the wider the model is."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW: decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW: decay of the second moment."""
    eps: float = Field(1e-8, ge=1e-30)
    """AdamW: added to the root of the second moment."""
    adam_weight_decay: float = Field(0.0, ge=0)
    """AdamW: decoupled decay of embeddings and head."""

    @property
    def of_matrices(self) -> str:
        return f"optim={self.kind}"

    @property
    def gathers(self) -> bool:
        return self.row_beta2 is None

    @property
    def whole_by(self) -> str:
        return super().whole_by if self.row_beta2 is None else f"optim.row_beta2={self.row_beta2}"

    def build(self, named: NamedWeights, traits: Mapping[str, Traits]) -> Optimizer:
        inner, outer = ([pair for pair in named if traits[pair[0]].matrix == of] for of in (True, False))
        adam = {"beta1": self.beta1, "beta2": self.beta2}
        tables, rest = ([pair for pair in outer if (self.embed_lr is not None and traits[pair[0]].table) == of] for of in (True, False))
        groups = decaying(tables, self.embed_lr or self.adam_lr, self.adam_weight_decay, traits)
        groups += decaying(rest, self.adam_lr, self.adam_weight_decay, traits)
        groups = [group | adam | {"eps": self.eps * group["rates"].eps} for group in groups]
        for of, part in alike(inner, traits):
            factor = of.rates.muon
            group = grouped(part, of.peak(self.lr, factor), of.decay(self.weight_decay, factor))
            own = {"momentum": self.momentum, "cautious": self.cautious_decay, "iteration": self.iteration, "row_beta2": self.row_beta2}
            groups.append(group | own)
        return MuonAdamW(groups)

    def state_bytes(self, shape: Sequence[int], matrix: bool, number: int) -> int:
        return (4 if matrix else 2 * number) * prod(shape)


@dataclass
class Matrices:
    """Whole matrices on this process, all of one shape: (rows, columns), or stacks (e, rows, columns)."""

    shapes: Sequence[Sequence[int]]  # of each whole matrix or stack
    weights: list[Tensor]
    grads: list[Tensor]
    momenta: list[Tensor]
    squares: list[Tensor]  # running mean squares of rows; empty without NorMuon

    def orthogonal(self, updates: list[Tensor], iteration: Iteration) -> Sequence[Tensor]:
        """Returns each update replaced by (nearly) the closest matrix whose singular values are all 1."""
        stacked = torch.stack(updates)
        return orthogonalize(stacked.flatten(0, -3), iteration).view_as(stacked).unbind()  # (n, e, rows, columns) -> (n*e, rows, columns)


@dataclass
class Sliced(Matrices):
    """Flat slices of matrices of any shapes. Each matrix is gathered on one rank, orthogonalized there, and scattered again."""

    cuts: Sequence[Cut]
    group: ProcessGroup | None

    def orthogonal(self, updates: list[Tensor], iteration: Iteration) -> Sequence[Tensor]:
        parts = [cut.matrices() for cut in self.cuts]
        exchange = Exchange([part for of in parts for part in of], self.group)
        rank = torch.distributed.get_rank(self.group)
        sizes = [[part.sizes[rank] for part in of] for of in parts]
        whole = exchange.gather([piece for x, of in zip(updates, sizes, strict=True) for piece in x.split(of)])
        for shape in dict.fromkeys(x.shape for x in whole):
            of_shape = [i for i, x in enumerate(whole) if x.shape == shape]
            for i, x in zip(of_shape, orthogonalize(torch.stack([whole[i] for i in of_shape]), iteration), strict=True):
                whole[i] = x
        pieces = iter(exchange.scatter(whole, updates[0]))
        return [torch.cat([next(pieces) for _ in of]) for of in parts]


def _of_shards(params: list[Tensor], grads: list[Tensor], momenta: list[Tensor], group: Group) -> Sliced:
    """Returns the slices that FSDP2 has cut along the last dimension of its mesh, or as the group's CUTS say. Replicas along another mesh
    dimension all do the same work."""
    mesh = cast("DTensor", params[0]).device_mesh
    last = mesh.ndim - 1
    weights, grads, momenta = ([cast("DTensor", x).to_local().view(-1) for x in xs] for xs in (params, grads, momenta))
    cuts = [group[CUTS][p] for p in params] if CUTS in group else [by_rows(p.shape, mesh.size(last)) for p in params]
    ranks = group[RANKS] if CUTS in group else mesh.get_group(last)
    return Sliced([cut.shape for cut in cuts], weights, grads, momenta, [], cuts, ranks)


def _of_flat(cuts: Sequence[Cut], weight: Tensor, grad: Tensor, momentum: Tensor) -> Sliced:
    """Returns the slices of an engine that keeps this rank's slices of all weights in one flat, padded tensor."""
    rank = torch.distributed.get_rank()
    sizes = [cut.sizes[rank] for cut in cuts]
    padded = [*sizes, weight.numel() - sum(sizes)]
    weights, grads, momenta = ([*x.split(padded)[:-1]] for x in (weight, grad, momentum))
    return Sliced([cut.shape for cut in cuts], weights, grads, momenta, [], cuts, None)


class MuonAdamW(Skippable):
    """Steps groups that have a `momentum` with Muon, the others with AdamW."""

    def initial_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        if "momentum" not in group:
            return adam_state(p)
        rows = {} if group["row_beta2"] is None else {"row_square": torch.zeros((*p.shape[:-1], 1), device=p.device)}
        return momentum_state(p) | rows

    def _step(self, params: list[Tensor], group: Group) -> None:
        from torch.distributed.tensor import DTensor  # here: a config of Muon is known without it

        if "momentum" not in group:
            adamw_step(params, [self.state[p] for p in params], group, self.found_inf)
            return
        momenta, grads = [self.state[p]["momentum"] for p in params], [cast("Tensor", p.grad).float() for p in params]
        if isinstance(params[0], DTensor):
            self._muon(_of_shards(params, grads, momenta, group), group)
        elif CUTS in group:
            self._muon(_of_flat(group[CUTS], params[0], grads[0], momenta[0]), group)
        else:
            squares = [] if group["row_beta2"] is None else [self.state[p]["row_square"] for p in params]
            for shape in dict.fromkeys(p.shape for p in params):
                of_shape = [[x for p, x in zip(params, xs, strict=False) if p.shape == shape] for xs in (params, grads, momenta, squares)]
                self._muon(Matrices([shape] * len(of_shape[0]), *of_shape), group)

    def _muon(self, matrices: Matrices, group: Group) -> None:
        lr, mu = group["lr"], group["momentum"]
        momentum = torch._foreach_lerp(matrices.momenta, matrices.grads, 1 - mu)
        nesterov = torch._foreach_lerp(matrices.grads, momentum, mu)
        dtype = fast_dtype(matrices.weights[0].device)
        updates: Sequence[Tensor] = matrices.orthogonal([x.to(dtype) for x in nesterov], group["iteration"])
        if matrices.squares:
            updates, squares = even_rows(updates, matrices.squares, group["row_beta2"])
            self._write(matrices.squares, squares)
        kept, weights = 1 - lr * group["weight_decay"], [p.float() for p in matrices.weights]
        if group["cautious"]:
            stepped = [torch.where(p * update >= 0, p * kept, p) for p, update in zip(weights, updates, strict=True)]
        else:
            stepped = list(torch._foreach_mul(weights, kept))
        for p, update, shape in zip(stepped, updates, matrices.shapes, strict=True):
            p.add_(update, alpha=-lr * max(1, shape[-2] / shape[-1]) ** 0.5)
        self._write(matrices.momenta, momentum)
        self._write(matrices.weights, stepped)
