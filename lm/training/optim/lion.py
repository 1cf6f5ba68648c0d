"""Lion.  Chen et al. 2023, arXiv:2302.06675, algorithm 2."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal

from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from lm.training.optim.base import Group, NamedWeights, OptimConfig, Skippable, State, decaying, momentum_state
from lm.training.optim.traits import Traits


class LionConfig(OptimConfig):
    """The sign of a momentum, with half of AdamW's state (Chen et al. 2023, arXiv:2302.06675)."""

    obeys_rates = True  # an element moves as far as any other, as with AdamW

    kind: Literal["lion"] = "lion"
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate; 3 to 10 times less than AdamW's (section 5 of the paper)."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """How much of the momentum is in a step."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """Decay of the momentum."""
    weight_decay: float = Field(0.3, ge=0)
    """Decoupled decay of matrices and embeddings; 3 to 10 times more than AdamW's."""

    def build(self, named: NamedWeights, traits: Mapping[str, Traits]) -> Optimizer:
        own = {"beta1": self.beta1, "beta2": self.beta2}
        return Lion([group | own for group in decaying(named, self.lr, self.weight_decay, traits)])

    def state_bytes(self, shape: Sequence[int], matrix: bool, number: int) -> int:
        return 4 * prod(shape)


class Lion(Skippable):
    """w <- w - lr * (sign(beta1 * m + (1 - beta1) * gradient) + decay * w);  m <- beta2 * m + (1 - beta2) * gradient, in float32."""

    def initial_state(self, group: Group, p: Tensor) -> State:
        return momentum_state(p)

    def _step(self, params: list[Tensor], group: Group) -> None:
        for p in params:
            assert p.grad is not None
            momentum, gradient = self.state[p]["momentum"], p.grad.float()
            update = momentum.lerp(gradient, 1 - group["beta1"]).sign() + group["weight_decay"] * p.float()
            self._write([p, momentum], [p - group["lr"] * update, momentum.lerp(gradient, 1 - group["beta2"])])
