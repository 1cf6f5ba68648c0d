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
    beta: float = 0.0  # which divergence, as in `divergence`

    @torch.no_grad()
    def probabilities(self, rows: slice | Tensor, size: int) -> Tensor:
        """Returns (rows, size) at the temperature, in float32 or wider.  size: of the model's vocabulary: an embedding may have more rows
        than the tokenizer tokens, of which the teacher's further ones are left out, and the model's are given nothing."""
        logits = wide(self.head(self.hidden[rows])[:, :size])
        soft = (logits if self.temperature == 1 else logits / self.temperature).softmax(-1)
        return soft if soft.shape[-1] == size else F.pad(soft, (0, size - soft.shape[-1]))  # which copies it all in any case


def divergence(soft: Tensor, logs: Tensor, beta: float = 0.0) -> Tensor:
    """(n,) how far a model q is from its teacher p, in nats.  soft: (n, v) p; logs: (n, v) log q.

    beta 0: KL(p || q); 1: KL(q || p); between: beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, the generalized
    Jensen-Shannon divergence (Agarwal et al. 2023, arXiv:2306.13649, equation 1), which goes to 0 with beta and with 1 - beta: only
    divided by these does it go to the two KL. Where p is 0, log p is that of the smallest number, so that KL(q || p) is finite.
    """
    if beta == 0:
        return -(torch.special.entr(soft) + soft * logs).sum(-1)
    q = logs.exp()
    if beta == 1:
        return (q * (logs - _log(soft))).sum(-1)
    mixed = beta * soft + (1 - beta) * q
    return (beta * soft * _log(soft) + (1 - beta) * q * logs - mixed * _log(mixed)).sum(-1)


def divergence_gradient(soft: Tensor, logs: Tensor, beta: float) -> Tensor:
    """(n, v) the gradient of `divergence` by the logits that `logs` is the log-softmax of: q (g - sum of q g) with g = dD/dq, up to a
    constant."""
    q = logs.exp()
    if beta == 0:
        return q - soft
    g = logs - _log(soft) if beta == 1 else (logs - _log(beta * soft + (1 - beta) * q)).mul_(1 - beta)
    return g.sub_((q * g).sum(-1, keepdim=True)).mul_(q)


def _log(p: Tensor) -> Tensor:
    return p.clamp_min(torch.finfo(p.dtype).tiny).log()
