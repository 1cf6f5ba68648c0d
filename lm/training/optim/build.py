from collections.abc import Container, Iterable, Iterator
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.config import Slot
from lm.training.optim.muon import MuonAdamW
from lm.training.optim.skippable import SGD


class OptimConfig(Slot, group="optim"):
    """The optimizer and its rates."""

    lr: float = Field(gt=0)
    """Peak learning rate."""
    clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm. null: no clipping."""


class AdamWConfig(OptimConfig):
    """AdamW, fused; no decay on norms, biases and other vectors (Loshchilov & Hutter 2017, arXiv:1711.05101)."""

    kind: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of matrices and embeddings."""
    clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm. null: no clipping."""


class MuonConfig(OptimConfig):
    """Muon for the blocks' matrices, AdamW for embeddings, head and vectors (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982)."""

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
    eps: float = Field(1e-8, gt=0)
    """AdamW: added to the root of the second moment."""
    adam_weight_decay: float = Field(0.0, ge=0)
    """AdamW: decoupled decay of embeddings and head."""
    clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm. null: no clipping."""


class SGDConfig(OptimConfig):
    """Plain gradient descent; unlike AdamW it shows a gradient of the wrong scale."""

    kind: Literal["sgd"] = "sgd"
    lr: float = Field(0.1, gt=0)
    """Peak learning rate."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Heavy-ball momentum."""
    weight_decay: float = Field(0.0, ge=0)
    """Decay of matrices and embeddings."""
    clip: float | None = Field(None, gt=0)
    """Largest global gradient norm. null: no clipping."""


Named = list[tuple[str, nn.Parameter]]
Group = dict[str, Any]


def vectors_of(named: Iterable[tuple[str, nn.Parameter]]) -> set[str]:
    """Norms, biases and other vectors, which do not decay; experts' biases are stacked, (e, out)."""
    return {name for name, p in named if p.ndim < 2 or name.endswith("bias")}


def build_optimizer(
    cfg: OptimConfig, named: Iterable[tuple[str, nn.Parameter]], matrices: Container[str], vectors: Container[str] | None = None
) -> Optimizer:
    """One optimizer over what is trainable; each group carries the `names` of its parameters and its `peak_lr`.

    matrices: names of the blocks' matrices and stacks of them, which are Muon's.  vectors: names that do not decay, where an engine has
    cut the weights already, so that their shapes no longer tell.
    """
    trainable = [(name, p) for name, p in named if p.requires_grad]
    vectors = vectors_of(trainable) if vectors is None else vectors
    if isinstance(cfg, MuonConfig):
        return MuonAdamW(_muon_groups(cfg, trainable, matrices, vectors))
    groups = _groups(trainable, cfg.lr, cfg.weight_decay, vectors)
    if isinstance(cfg, SGDConfig):
        return SGD([group | {"momentum": cfg.momentum} for group in groups])
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Set each group's rate to a part of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def state_bytes(cfg: OptimConfig, number: int) -> tuple[int, int]:
    """What `build_optimizer` keeps per element of the blocks' matrices, and of everything else.  number: bytes of a weight."""
    if isinstance(cfg, SGDConfig):
        return (4, 4) if cfg.momentum else (0, 0)
    return (4 if isinstance(cfg, MuonConfig) else 2 * number), 2 * number


def _groups(named: Named, lr: float, weight_decay: float, vectors: Container[str]) -> list[Group]:
    """Matrices and embeddings decay; vectors do not."""
    decaying = [(name, p) for name, p in named if name not in vectors]
    others = [(name, p) for name, p in named if name in vectors]
    return [_group(part, lr, decay) for part, decay in ((decaying, weight_decay), (others, 0.0)) if part]


def _group(named: Named, lr: float, weight_decay: float) -> Group:
    return {
        "params": [p for _, p in named],
        "names": [name for name, _ in named],
        "lr": lr,
        "peak_lr": lr,
        "weight_decay": weight_decay,
    }


def _muon_groups(cfg: MuonConfig, named: Named, matrices: Container[str], vectors: Container[str]) -> list[Group]:
    inner = [(name, p) for name, p in named if name in matrices]
    outer = [(name, p) for name, p in named if name not in matrices]
    adam = {"betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps}
    groups = [group | adam for group in _groups(outer, cfg.adam_lr, cfg.adam_weight_decay, vectors)]
    if inner:
        groups.append(_group(inner, cfg.lr, cfg.weight_decay) | {"momentum": cfg.momentum})
    return groups


def initial_state(optimizer: Optimizer, group: Group, p: Tensor) -> dict[str, Tensor]:
    """Of one parameter, or a flat slice of several: momentum in float32, AdamW's as its kernel wants it."""
    if "betas" in group:
        zero = torch.zeros((), dtype=torch.float32, device=p.device)
        return {"step": zero, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    if group["momentum"] or isinstance(optimizer, MuonAdamW):
        return {"momentum_buffer": torch.zeros_like(p, dtype=torch.float32)}
    return {}


@torch.no_grad()
def begin_state(optimizer: Optimizer) -> None:
    """All state before the first step, so that it can be saved and loaded at any step."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = initial_state(optimizer, group, p)


def neutral(key: str) -> str:
    """A state tensor's name in checkpoints, given torch's."""
    return "momentum" if key == "momentum_buffer" else key


def named_state(optimizer: Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    """(parameter, kind, tensor) of all state."""
    for group in optimizer.param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            for key, tensor in optimizer.state[p].items():
                yield name, neutral(key), tensor
