"""Attention: each key is weighed by itself, by a sigmoid; weights need not add up to 1.  Ramapuram et al. 2024, arXiv:2409.04431.

lm train plugins=examples/plugins/sigmoid.py model/attention=mha,sigmoid -m
"""

from typing import Literal

import torch
from torch import Tensor

from lm.kinds import Activations, AttentionConfig, Context, Linear, Mixer, NormConfig, Out, PerToken


class SigmoidConfig(AttentionConfig):
    """sigmoid(q k / sqrt(c) + offset - log n) v, where a query sees n tokens."""

    kind: Literal["sigmoid"] = "sigmoid"
    offset: float = 0.0
    """Added to every score."""

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return SigmoidAttention(self, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        return 4 * d_model * seq_len

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        return Activations(0, 4 * d_model)

    def saved_scores(self, seq_len: int, device: str) -> Activations:
        """Of all pairs: the sigmoids and what is left of them."""
        return Activations(0, 2 * self.n_heads * seq_len, seq_len)

    def state(self, d_model: int, layer: int) -> PerToken:
        return PerToken(((self.n_heads, self.rotary_width(d_model)),) * 2)


class SigmoidAttention(Mixer):
    """Project, rotate, cache, weigh, project."""

    def __init__(self, cfg: SigmoidConfig, d: int, layer: int) -> None:
        super().__init__(layer)
        self.head_dim, self.offset = cfg.rotary_width(d), cfg.offset
        self.q, self.k, self.v, self.o = Linear(d, d), Linear(d, d), Linear(d, d), Out(d, d)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))  # (b, s, d) -> (b, h, s, c)
        q, k = (ctx.position.rotate(each, ctx.angles, self.layer) for each in (q, k))
        if ctx.cache is not None:
            k, v = ctx.cache.append(self.layer, k, v)  # as `state` has declared them; gives all that the tokens may see, (b, h, k, c)
        mask = ctx.keys(self.layer)  # after `append`
        seen, bias = mask.allowed(None), ctx.position.bias_of_layer(mask.q_positions, mask.k_positions, self.layer)  # None: no window
        scores = q @ k.mT / self.head_dim**0.5 + self.offset - seen.sum(-1, keepdim=True).clamp_min(1).log()  # (b, h, q, k)
        weights = torch.sigmoid(scores if bias is None else scores + bias) * seen
        return self.o((weights @ v).transpose(1, 2).flatten(2))  # (b, h, q, c) -> (b, q, h*c)
