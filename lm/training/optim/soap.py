"""SOAP for matrices and AdamW for the rest, as one optimizer.  Vyas et al. 2024, arXiv:2409.11321, algorithm 3."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from lm.training.optim.base import Group, NamedWeights, OptimConfig, Skippable, State, adam_state, adamw_step, decaying
from lm.training.optim.traits import Traits

_SIDES = "left", "right"


class SoapConfig(OptimConfig):
    """Adam in the eigenbasis of Shampoo for the blocks' matrices, AdamW for embeddings, head and vectors (Vyas et al. 2024,
    arXiv:2409.11321)."""

    whole_matrices = True
    shapes_state = ("one_sided", "max_precondition_dim")  # the moments are those in the basis

    kind: Literal["soap"] = "soap"
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate."""
    beta1: float = Field(0.95, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment, and of the products of a gradient with itself whose eigenvectors are the basis."""
    eps: float = Field(1e-8, ge=1e-30)
    """Added to the root of the second moment."""
    precondition_frequency: int = Field(10, gt=0)
    """Steps from one basis to the next, which a power iteration and a QR decomposition find."""
    one_sided: bool = False
    """Only the shorter side of a matrix has a basis: less time and memory."""
    max_precondition_dim: int = Field(10_000, gt=0)
    """A side with more rows, or columns, has no basis, which takes two square matrices of that size."""
    embed_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the embedding, also where it is the head too, and of other tables. null: lr."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled decay of matrices and embeddings."""

    @property
    def of_matrices(self) -> str:
        return f"optim={self.kind}"

    def build(self, named: NamedWeights, traits: Mapping[str, Traits]) -> Optimizer:
        parts: dict[tuple[bool, float], NamedWeights] = {}
        for name, p in named:
            rate = self.embed_lr if self.embed_lr is not None and traits[name].table else self.lr
            parts.setdefault((traits[name].matrix, rate), []).append((name, p))
        own = {"beta1": self.beta1, "beta2": self.beta2, "eps": self.eps}
        soap = {key: getattr(self, key) for key in ("precondition_frequency", "max_precondition_dim", "one_sided")}
        return Soap([
            group | own | (soap if matrix else {})
            for (matrix, rate), part in sorted(parts.items(), key=lambda item: item[0])
            for group in decaying(part, rate, self.weight_decay, traits)
        ])  # fmt: skip

    def state_bytes(self, shape: Sequence[int], matrix: bool, number: int) -> int:
        n = prod(shape)
        if not matrix:
            return 2 * number * n
        squares = sum(shape[dim] ** 2 for dim in _dims(shape, self.max_precondition_dim, self.one_sided))
        return 4 * 2 * (n + n // (shape[-2] * shape[-1]) * squares)


def _dims(shape: Sequence[int], max_precondition_dim: int, one_sided: bool) -> list[int]:
    """Returns the dimensions of a matrix, or of each one of a stack, that have a basis: -2 for the left one, -1 for the right one."""
    found = [dim for dim in (-2, -1) if shape[dim] <= max_precondition_dim]
    return [min(found, key=lambda dim: shape[dim])] if one_sided and found else found


class Side(NamedTuple):
    """The basis of a side of a matrix: orthonormal columns, (..., size, size), and the running mean of products that it is found from."""

    dim: int
    products: Tensor
    basis: Tensor

    def see(self, grad: Tensor, weight: float) -> None:
        """Counts the products of the gradient in with this weight."""
        self.products.lerp_(grad @ grad.mT if self.dim == -2 else grad.mT @ grad, weight)

    def begin(self) -> None:
        """Makes the eigenvectors of the products the basis, those of the largest eigenvalues first."""
        self.basis.copy_(torch.linalg.eigh(self.products).eigenvectors.flip(-1))

    def turn(self) -> Tensor:
        """Replaces the basis by a power iteration of it (algorithm 4), the largest eigenvalues first; returns that order of the old one."""
        product = self.products @ self.basis
        order = (self.basis * product).sum(-2).argsort(-1, descending=True)
        self.basis.copy_(torch.linalg.qr(_picked(product, order, -1)).Q)
        return order

    def onto(self, x: Tensor) -> Tensor:
        """Returns what x is in the basis."""
        return self.basis.mT @ x if self.dim == -2 else x @ self.basis

    def back(self, x: Tensor) -> Tensor:
        """Returns what `onto` was given."""
        return self.basis @ x if self.dim == -2 else x @ self.basis.mT


def _picked(x: Tensor, order: Tensor, dim: int) -> Tensor:
    """Returns x with its rows (dim=-2) or columns (-1) in this order, (..., size), of each matrix."""
    return x.gather(dim, order.unsqueeze(-3 - dim).expand(x.shape))


class Soap(Skippable):
    """Steps groups that have `precondition_frequency` with SOAP, the others with AdamW. Both moments of a matrix are those in its basis.

    The first step finds the basis and leaves the matrix as it is, as in the code of SOAP's authors.
    """

    def initial_state(self, group: Group, p: Tensor) -> State:
        if "precondition_frequency" not in group:
            return adam_state(p)
        state = {"step": torch.zeros((), device="cpu")} | {
            key: torch.zeros_like(p, dtype=torch.float32) for key in ("exp_avg", "exp_avg_sq")
        }
        for dim in _dims(p.shape, group["max_precondition_dim"], group["one_sided"]):
            for key in (_SIDES[dim], f"{_SIDES[dim]}_basis"):
                state[key] = torch.zeros(*p.shape[:-2], p.shape[dim], p.shape[dim], device=p.device)
        return state

    def _flag_is_here(self) -> bool:
        return True  # a device is waited for: which step has a new basis is known here, and a skipped one does not count

    def _step(self, params: list[Tensor], group: Group) -> None:
        if "precondition_frequency" not in group:
            adamw_step(params, [self.state[p] for p in params], group, self.found_inf)
            return
        for p in params:
            assert p.grad is not None
            self._matrix(p, p.grad.float(), self.state[p], group)

    def _matrix(self, p: Tensor, grad: Tensor, state: State, group: Group) -> None:
        beta1, beta2, before = group["beta1"], group["beta2"], int(state["step"])
        dims = _dims(p.shape, group["max_precondition_dim"], group["one_sided"])
        sides = [Side(dim, state[_SIDES[dim]], state[f"{_SIDES[dim]}_basis"]) for dim in dims]
        state["step"] += 1
        for side in sides:
            side.see(grad, 1 - beta2)
            if before == 0:
                side.begin()
        if before == 0:
            return
        for side in sides:
            grad = side.onto(grad)
        mean, square = state["exp_avg"].lerp_(grad, 1 - beta1), state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
        update = mean / square.sqrt().add_(group["eps"]) * ((1 - beta2**before) ** 0.5 / (1 - beta1**before))
        for side in sides:
            update = side.back(update)
        p.copy_(p.float() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * update)
        if before % group["precondition_frequency"] == 0:
            for side in sides:
                whole = side.back(mean)
                square.copy_(_picked(square, side.turn(), side.dim))
                mean.copy_(side.onto(whole))
