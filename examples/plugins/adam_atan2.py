"""An optimizer: AdamW without an eps, whose step is an angle and no quotient.  Everett et al. 2024, arXiv:2407.05872.

lm train plugins=examples/plugins/adam_atan2.py optim=adam_atan2 optim.lr=1e-3,3e-3 -m
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Size, Tensor
from torch.optim import Optimizer

from lm.kinds import Group, NamedWeights, OptimConfig, Skippable, Traits, decaying


class AdamAtan2Config(OptimConfig):
    """w <- w - lr * (atan2(m, sqrt(v)) + decay * w), with Adam's moments m and v; larger gradients make no other step."""

    obeys_rates: ClassVar[bool] = True  # an element moves as far as any other, as with AdamW

    kind: Literal["adam_atan2"] = "adam_atan2"
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate; an element moves by pi / 4 of it where its gradients are alike, with AdamW by all of it."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of matrices and embeddings."""

    def build(self, named: NamedWeights, traits: Mapping[str, Traits]) -> Optimizer:
        own = {"betas": (self.beta1, self.beta2)}
        return AdamAtan2([group | own for group in decaying(named, self.lr, self.weight_decay, traits)])

    def state_bytes(self, shape: Sequence[int], matrix: bool, number: int) -> int:
        return 2 * 4 * Size(shape).numel()


class AdamAtan2(Skippable):
    """Computed in float32, whatever the weights are."""

    def initial_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        mean, square = (torch.zeros_like(p, dtype=torch.float32) for _ in range(2))
        return {"step": torch.zeros((), device=p.device), "mean": mean, "square": square}

    def _step(self, params: list[Tensor], group: Group) -> None:
        beta1, beta2 = group["betas"]
        for p in params:
            (step, mean, square), gradient = self.state[p].values(), p.grad.float()
            step, mean, square = step + 1, mean.lerp(gradient, 1 - beta1), square.lerp(gradient.square(), 1 - beta2)
            angle = torch.atan2(mean / (1 - beta1**step), (square / (1 - beta2**step)).sqrt())
            update = angle + group["weight_decay"] * p.float()
            self._write([p, *self.state[p].values()], [p - group["lr"] * update, step, mean, square])
