"""Muon for matrices and AdamW for the rest, as one optimizer. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lm.training.optim.base import Group, NamedWeights, OptimConfig, Skippable, adam_state, alike, decaying, grouped, momentum_state
from lm.training.optim.traits import Traits

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: singular values land in about 0.7 to 1.2 after 5 steps
STEPS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """U V^T of each matrix = U S V^T in the batch, nearly: 5 quintic Newton-Schulz steps in the dtype given.

    matrices: (n, rows, columns).  The batch is one chain of large products, where torch.optim.Muon loops over matrices.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True, dtype=torch.float32) + 1e-7).to(x.dtype)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def fast_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the hardware multiplies it (on an AVX512-BF16 core about 4 times as fast as float32), else float32."""
    native = torch.cpu._is_avx512_bf16_supported() if device.type == "cpu" else torch.cuda.is_bf16_supported()
    return torch.bfloat16 if native else torch.float32


class MuonConfig(OptimConfig):
    """Muon for the blocks' matrices, AdamW for embeddings, head and vectors (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982)."""

    whole_matrices: ClassVar[bool] = True
    obeys_rates: ClassVar[bool] = True

    kind: Literal["muon"] = "muon"
    lr: float = Field(0.02, gt=0)
    """Peak learning rate of the matrices; an update has spectral norm about 1 times sqrt(max(1, rows / columns))."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Nesterov momentum of the matrices."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled decay of the matrices."""
    adam_lr: float = Field(3e-3, gt=0)
    """Peak learning rate of everything else."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW: decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW: decay of the second moment."""
    eps: float = Field(1e-8, ge=1e-30)
    """AdamW: added to the root of the second moment."""
    adam_weight_decay: float = Field(0.0, ge=0)
    """AdamW: decoupled decay of embeddings and head."""

    def build(self, named: NamedWeights, traits: Mapping[str, Traits]) -> Optimizer:
        inner, outer = ([pair for pair in named if traits[pair[0]].matrix == of] for of in (True, False))
        adam = {"beta1": self.beta1, "beta2": self.beta2}
        groups = decaying(outer, self.adam_lr, self.adam_weight_decay, traits)
        groups = [group | adam | {"eps": self.eps * group["rates"].eps} for group in groups]
        for of, part in alike(inner, traits):
            factor = of.rates.muon
            groups.append(grouped(part, of.peak(self.lr, factor), of.decay(self.weight_decay, factor)) | {"momentum": self.momentum})
        return MuonAdamW(groups)

    def state_bytes(self, number: int) -> tuple[int, int]:
        return 4, 2 * number


class MuonAdamW(Skippable):
    """Groups with a `momentum` are Muon's, the others AdamW's."""

    def initial_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        return momentum_state(p) if "momentum" in group else adam_state(p)

    def _step(self, params: list[Tensor], group: Group) -> None:
        if "momentum" not in group:
            self._adamw(params, group)
            return
        for shape in dict.fromkeys(p.shape for p in params):
            self._muon([p for p in params if p.shape == shape], group)

    def _muon(self, params: list[Tensor], group: Group) -> None:
        """params: all of one shape."""
        lr, mu = group["lr"], group["momentum"]
        shape = params[0].shape  # (rows, columns), or a stack of such: (e, rows, columns)
        grads, old = [_grad(p).float() for p in params], [self.state[p]["momentum"] for p in params]
        momentum = torch._foreach_lerp(old, grads, 1 - mu)
        nesterov = torch._foreach_lerp(grads, momentum, mu)
        dtype = fast_dtype(params[0].device)
        stacked = torch.stack([x.to(dtype) for x in nesterov]).flatten(0, -3)  # (n*e, rows, columns)
        update = orthogonalize(stacked).view(-1, *shape).unbind()
        stepped = torch._foreach_mul([p.float() for p in params], 1 - lr * group["weight_decay"])
        torch._foreach_add_(stepped, update, alpha=-lr * max(1, shape[-2] / shape[-1]) ** 0.5)
        self._write(old, momentum)
        self._write(params, stepped)

    def _adamw(self, params: list[Tensor], group: Group) -> None:
        means, squares, steps = ([self.state[p][key] for p in params] for key in ("exp_avg", "exp_avg_sq", "step"))
        options: Group = {key: group[key] for key in ("lr", "weight_decay", "eps", "beta1", "beta2")}
        options |= {"fused": True, "amsgrad": False, "maximize": False, "found_inf": self.found_inf}
        adamw(params, [_grad(p) for p in params], means, squares, [], steps, **options)


def _grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad
