"""Adafactor.  Shazeer & Stern 2018, arXiv:1804.04235."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from lm.training.optim.base import Group, NamedWeights, OptimConfig, Skippable, State, decaying
from lm.training.optim.traits import Traits


class AdafactorConfig(OptimConfig):
    """Adam whose second moment of a matrix is kept as means of its rows and columns, without a first moment: hardly any memory for states
    (Shazeer & Stern 2018, arXiv:1804.04235; T5)."""

    whole_matrices = True
    shapes_state = ("scale_parameter",)  # the momentum is one of updates, the rate included

    kind: Literal["adafactor"] = "adafactor"
    lr: float = Field(1e-2, gt=0)
    """Peak learning rate: the root mean square of what a step changes, as a part of the weight's own where scale_parameter is true."""
    scale_parameter: bool = True
    """The rate of a weight is times the root mean square of its numbers."""
    min_scale: float = Field(1e-3, gt=0)
    """What that root counts at least, so that a weight of zeros learns."""
    decay_rate: float = Field(0.8, gt=0)
    """The decay of the second moment at step t is 1 - t^-decay_rate."""
    eps: float = Field(1e-30, ge=1e-30)
    """Added to the square of the gradient."""
    clip_threshold: float = Field(1.0, gt=0)
    """An update whose root mean square is larger is scaled down to it."""
    beta1: float | None = Field(None, ge=0, lt=1)
    """Decay of a mean of the updates, which takes as much memory as the weight in float32. null: there is none."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled decay of matrices and embeddings."""

    def build(self, named: NamedWeights, traits: Mapping[str, Traits]) -> Optimizer:
        own = {key: getattr(self, key) for key in ("scale_parameter", "min_scale", "decay_rate", "eps", "clip_threshold", "beta1")}
        return Adafactor([group | own for group in decaying(named, self.lr, self.weight_decay, traits)])

    def state_bytes(self, shape: Sequence[int], matrix: bool, number: int) -> int:
        squares = prod(shape[:-2]) * (shape[-2] + shape[-1]) if len(shape) > 1 else prod(shape)
        return 4 * (squares + (0 if self.beta1 is None else prod(shape)))


class Adafactor(Skippable):
    """Each matrix of a stack steps as it would alone; vectors keep their second moment whole."""

    def initial_state(self, group: Group, p: Tensor) -> State:
        state = {"step": torch.zeros((), device=p.device)}
        if p.ndim > 1:
            state |= {"row": torch.zeros(p.shape[:-1], device=p.device), "column": torch.zeros(*p.shape[:-2], p.shape[-1], device=p.device)}
        else:
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        if group["beta1"] is not None:
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
        return state

    def _step(self, params: list[Tensor], group: Group) -> None:
        for p in params:
            assert p.grad is not None
            new = self._after(p.float(), p.grad.float(), self.state[p], group)
            self._write([p, *self.state[p].values()], list(new))

    def _after(self, w: Tensor, grad: Tensor, state: State, group: Group) -> Iterator[Tensor]:
        """Yields the weight after a step, and the tensors of its state in their order.  w, grad: in float32."""
        step, square = state["step"] + 1, grad.square() + group["eps"]
        new, share = {"step": step}, step ** -group["decay_rate"]
        if w.ndim > 1:
            row, column = state["row"].lerp(square.mean(-1), share), state["column"].lerp(square.mean(-2), share)
            new |= {"row": row, "column": column}
            update = grad * row.rsqrt().unsqueeze(-1) * (column.rsqrt() * row.mean(-1, keepdim=True).sqrt()).unsqueeze(-2)
        else:
            new["exp_avg_sq"] = state["exp_avg_sq"].lerp(square, share)
            update = grad * new["exp_avg_sq"].rsqrt()
        update = update * (group["lr"] / (_size(update) / group["clip_threshold"]).clamp(min=1))
        if group["scale_parameter"]:
            update = update * _size(w).clamp(min=group["min_scale"])
        if group["beta1"] is not None:
            new["exp_avg"] = update = state["exp_avg"].lerp(update, 1 - group["beta1"])
        yield w * (1 - group["lr"] * group["weight_decay"]) - update
        yield from new.values()


def _size(x: Tensor) -> Tensor:
    """Returns the root mean square of each matrix, (.., 1, 1), or of a vector, (1,)."""
    dims = tuple(range(-min(x.ndim, 2), 0))
    return x.square().mean(dims, keepdim=True).sqrt()
