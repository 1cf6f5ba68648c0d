"""AdamW.  Loshchilov & Hutter 2017, arXiv:1711.05101."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from lm.training.optim.base import Group, NamedWeights, OptimConfig, Stateful, adam_state, decaying
from lm.training.optim.traits import Traits


class AdamWConfig(OptimConfig):
    """AdamW, fused; no decay on norms, biases and other vectors (Loshchilov & Hutter 2017, arXiv:1711.05101)."""

    obeys_rates: ClassVar[bool] = True

    kind: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, ge=1e-30)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of matrices and embeddings."""

    def build(self, named: NamedWeights, traits: Mapping[str, Traits]) -> Optimizer:
        groups = [group | {"eps": self.eps * group["rates"].eps} for group in decaying(named, self.lr, self.weight_decay, traits)]
        return AdamW(groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)

    def state_bytes(self, number: int) -> tuple[int, int]:
        return 2 * number, 2 * number


class AdamW(torch.optim.AdamW, Stateful):
    """torch's, whose fused kernel looks at `found_inf` by itself."""

    def initial_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        return adam_state(p)
