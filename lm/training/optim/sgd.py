"""Plain gradient descent, in float32."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal

from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from lm.training.optim.base import Group, NamedWeights, OptimConfig, Skippable, decaying, momentum_state
from lm.training.optim.traits import Traits


class SGDConfig(OptimConfig):
    """Plain gradient descent; unlike AdamW it shows a gradient of the wrong scale."""

    kind: Literal["sgd"] = "sgd"
    lr: float = Field(0.1, gt=0)
    """Peak learning rate."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Heavy-ball momentum."""
    weight_decay: float = Field(0.0, ge=0)
    """Decay of matrices and embeddings, added to the gradient, so that the momentum has it too."""
    clip: float | None = Field(None, gt=0)
    """Largest global gradient norm. null: no clipping."""

    def build(self, named: NamedWeights, traits: Mapping[str, Traits]) -> Optimizer:
        groups = decaying(named, self.lr, self.weight_decay, traits)
        return SGD([group | {"momentum": self.momentum} for group in groups])

    def state_bytes(self, shape: Sequence[int], matrix: bool, number: int) -> int:
        return 4 * prod(shape) if self.momentum else 0


class SGD(Skippable):
    """m <- momentum * m + gradient + decay * w;  w <- w - lr * m, computed in float32.

    Not torch's SGD: up to 2.13 its fused kernel leaves most bf16 weights on a CPU unchanged (pytorch issue 191763), and only the fused
    kernel knows `found_inf`.
    """

    def initial_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        return momentum_state(p) if group["momentum"] else {}

    def _step(self, params: list[Tensor], group: Group) -> None:
        for p in params:
            assert p.grad is not None
            update = p.grad.float() + group["weight_decay"] * p.float()
            if group["momentum"]:
                momentum = self.state[p]["momentum"]
                update += group["momentum"] * momentum
                self._write([momentum], [update])
            self._write([p], [p - group["lr"] * update])
