"""A recurrent mixer: a GRU whose gate does not look at the state, so that a whole row is one scan.  Feng et al. 2024, arXiv:2410.01201.

lm train plugins=examples/plugins/min_gru.py model/recurrent=min_gru 'model.pattern=[recurrent,attention]'
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from lm.kinds import Activations, Context, Fixed, Linear, Mixer, NormConfig, Out, RecurrentConfig


class MinGRUConfig(RecurrentConfig):
    """h_t = (1 - z_t) h_(t-1) + z_t v_t, with z_t = sigmoid(gate(x_t)) and v_t = value(x_t); the output is o(h_t)."""

    kind: Literal["min_gru"] = "min_gru"
    expand: int = Field(1, gt=0)
    """Numbers of state for each dimension of the model."""

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return MinGRU(d_model, self.expand * d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        return 4 * self.expand * d_model

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        return Activations(0, 6 * self.expand * d_model)

    def state(self, d_model: int, layer: int) -> Fixed:
        return Fixed(((self.expand * d_model,),))


class MinGRU(Mixer):
    """A document begins with a state of zeros, and padding leaves the state as it is."""

    def __init__(self, d: int, hidden: int, layer: int) -> None:
        super().__init__(layer)
        self.gate, self.value, self.o = Linear(d, hidden), Linear(d, hidden), Out(hidden, d, bias=False)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        place = ctx.mask.q_positions.unsqueeze(-1)  # (b, s, 1), 0 where a document begins, -1 on padding
        take = torch.sigmoid(self.gate(x)) * (place >= 0)
        keep, h = (1 - take) * (place != 0), take * self.value(x)
        n = 1
        while n < x.shape[1]:  # each place adds what the n before it have come to (Hillis & Steele 1986)
            h = h + keep * F.pad(h, (0, 0, n, -n))
            keep = keep * F.pad(keep, (0, 0, n, -n), value=1.0)
            n *= 2
        if ctx.cache is not None:
            h = h + keep * ctx.cache.state(self.layer)[0].unsqueeze(1)
            ctx.cache.advance(self.layer, h[:, -(ctx.cache.slack + 1) :])
        return self.o(h)
