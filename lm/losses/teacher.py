"""What a frozen teacher says of the tokens of a batch, which the model is to say too: distillation.  Hinton et al. 2015, arXiv:1503.02531;
whole distributions, not samples of them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.nn.head import Head
from lm.ops.precision import wide


@dataclass(frozen=True)
class SoftTargets:
    """A teacher's probabilities for the tokens of a batch, computed chunk by chunk from its last hidden states."""

    hidden: Tensor  # (n, d of the teacher)
    head: Head
    weight: float  # part of the loss; the rest is the labels'
    temperature: float = 1.0  # by which logits are divided, the model's too

    @torch.no_grad()
    def probabilities(self, rows: slice | Tensor, size: int) -> Tensor:
        """Returns (rows, size) at the temperature, in float32 or wider.  size: of the model's vocabulary: an embedding may have more rows
        than the tokenizer tokens, of which the teacher's further ones are left out, and the model's are given nothing."""
        logits = wide(self.head(self.hidden[rows])[:, :size])
        soft = (logits if self.temperature == 1 else logits / self.temperature).softmax(-1)
        return soft if soft.shape[-1] == size else F.pad(soft, (0, size - soft.shape[-1]))  # which copies it all in any case


def divergence(soft: Tensor, logs: Tensor) -> Tensor:
    """(n,) how far a model is from its teacher, KL(teacher || model), in nats.  soft: (n, v) the teacher's probabilities; logs: (n, v)
    log p of the model."""
    return -(torch.special.entr(soft) + soft * logs).sum(-1)
