"""AdamW.  Loshchilov & Hutter 2017, arXiv:1711.05101."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from lm.training.optim.base import Group, NamedWeights, OptimConfig, State, Stateful, adam_state, decaying
from lm.training.optim.codes import CODED_BYTES
from lm.training.optim.eight_bits import EightBitAdamW
from lm.training.optim.traits import Traits


class AdamWConfig(OptimConfig):
    """AdamW, fused; no decay on norms, biases and other vectors (Loshchilov & Hutter 2017, arXiv:1711.05101)."""

    obeys_rates = True

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
    state_bits: Literal[8] | None = None
    """8: both moments of the blocks' matrices in 8 bits, in blocks of 256 with a scale each, 2.03 bytes an element; embeddings, head and
    vectors keep theirs as the weights are (Dettmers et al. 2021, arXiv:2110.02861). null: so do all."""

    @property
    def coded_by(self) -> str | None:
        return f"optim.state_bits={self.state_bits}" if self.state_bits is not None else None

    @property
    def of_matrices(self) -> str | None:
        return self.coded_by

    def build(self, named: NamedWeights, traits: Mapping[str, Traits]) -> Optimizer:
        if self.state_bits is None:
            return AdamW(self._groups(named, traits), lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)
        parts = {coded: [pair for pair in named if traits[pair[0]].matrix == coded] for coded in (True, False)}
        own = {"beta1": self.beta1, "beta2": self.beta2}
        return EightBitAdamW([group | own | {"coded": coded} for coded, part in parts.items() for group in self._groups(part, traits)])

    def state_bytes(self, shape: Sequence[int], matrix: bool, number: int) -> float:
        return 2 * (CODED_BYTES if matrix and self.state_bits == 8 else number) * prod(shape)

    def _groups(self, named: NamedWeights, traits: Mapping[str, Traits]) -> list[Group]:
        return [group | {"eps": self.eps * group["rates"].eps} for group in decaying(named, self.lr, self.weight_decay, traits)]


class AdamW(torch.optim.AdamW, Stateful):
    """torch's AdamW, whose fused kernel itself skips the step where `found_inf` is 1."""

    def initial_state(self, group: Group, p: Tensor) -> State:
        return adam_state(p)
