"""Attention: contextual positions, by which a token is as far away as a gate counts keys.  Golovneva et al. 2024, arXiv:2405.18719.

lm train plugins=examples/plugins/cope.py model/attention=mha,cope model/position=none -m
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from lm.kinds import Activations, AttentionConfig, Context, Linear, Mixer, NormConfig, Out, PerToken


class CoPEConfig(AttentionConfig):
    """softmax(q k / sqrt(c) + q e[p]) v; p adds up sigmoid(q k / sqrt(c)) from the key to the query, and e is learned."""

    kind: Literal["cope"] = "cope"
    places: int = Field(64, gt=1)
    """Places that can be told apart; what is further away is at the last one."""

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return CoPE(self, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        return 4 * d_model * seq_len + 2 * d_model * self.places

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        return Activations(0, 4 * d_model + self.n_heads * self.places)

    def saved_scores(self, seq_len: int, device: str) -> Activations:
        return Activations(0, 11 * self.n_heads * seq_len, 3 * seq_len)  # gates, places (8 bytes each), what is read there, weights

    def state(self, d_model: int, layer: int) -> PerToken:
        return PerToken(((self.n_heads, self.rotary_width(d_model)),) * 2)


class CoPE(Mixer):
    """Project, cache, count, weigh, project."""

    def __init__(self, cfg: CoPEConfig, d: int, layer: int) -> None:
        super().__init__(layer)
        self.head_dim, self.places = cfg.rotary_width(d), nn.Parameter(torch.empty(cfg.places, cfg.rotary_width(d)))
        self.q, self.k, self.v, self.o = Linear(d, d), Linear(d, d), Linear(d, d), Out(d, d)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))  # (b, s, d) -> (b, h, s, c)
        q, k = (ctx.position.rotate(each, ctx.angles, self.layer) for each in (q, k))
        if ctx.cache is not None:
            k, v = ctx.cache.append(self.layer, k, v)  # as `state` has declared them; gives all that the tokens may see, (b, h, k, c)
        mask, scores, at = ctx.keys(self.layer), q @ k.mT / self.head_dim**0.5, q @ self.places.T  # (b, h, q, places)
        seen, bias = mask.allowed(None), ctx.position.bias_of_layer(mask.q_positions, mask.k_positions, self.layer)  # None: no window
        counted = (scores.sigmoid() * seen).flip(-1).cumsum(-1).flip(-1).clamp(max=len(self.places) - 1)  # (b, h, q, k)
        scores = scores + torch.lerp(*(at.gather(-1, place.long()) for place in (counted.floor(), counted.ceil())), counted.frac())
        scores = (scores if bias is None else scores + bias).masked_fill(~seen, float("-inf"))
        return self.o((scores.softmax(-1).masked_fill(~seen, 0.0) @ v).transpose(1, 2).flatten(2))  # 0, not NaN, where nothing is seen
