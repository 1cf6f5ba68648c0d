"""An optimizer: the sign of a momentum, with half of AdamW's state.  Chen et al. 2023, arXiv:2302.06675, algorithm 2.

lm train plugins=examples/plugins/lion.py optim=lion optim.lr=1e-4,3e-4 -m
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field
from torch import Size, Tensor
from torch.optim import Optimizer

from lm.kinds import Group, NamedWeights, OptimConfig, Skippable, Traits, decaying, momentum_state


class LionConfig(OptimConfig):
    """w <- w - lr * (sign(beta1 * m + (1 - beta1) * gradient) + decay * w);  m <- beta2 * m + (1 - beta2) * gradient."""

    obeys_rates: ClassVar[bool] = True  # an element moves as far as any other, as with AdamW

    kind: Literal["lion"] = "lion"
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate; 3 to 10 times less than AdamW's (section 5)."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """How much of the momentum is in a step."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """Decay of the momentum."""
    weight_decay: float = Field(1.0, ge=0)
    """Decoupled decay of matrices and embeddings; 3 to 10 times more than AdamW's."""

    def build(self, named: NamedWeights, traits: Mapping[str, Traits]) -> Optimizer:
        return Lion([group | {"betas": (self.beta1, self.beta2)} for group in decaying(named, self.lr, self.weight_decay, traits)])

    def state_bytes(self, shape: Sequence[int], matrix: bool, number: int) -> int:
        return 4 * Size(shape).numel()


class Lion(Skippable):
    """Computed in float32, whatever the weights are."""

    def initial_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        return momentum_state(p)

    def _step(self, params: list[Tensor], group: Group) -> None:
        beta1, beta2 = group["betas"]
        for p in params:
            momentum, gradient = self.state[p]["momentum"], p.grad.float()
            update = momentum.lerp(gradient, 1 - beta1).sign() + group["weight_decay"] * p.float()
            self._write([p, momentum], [p - group["lr"] * update, momentum.lerp(gradient, 1 - beta2)])
