"""Attention: heads are mixed before and after the softmax.  Shazeer et al. 2020, arXiv:2003.02436.

lm train plugins=examples/plugins/talking_heads.py model/attention=mha,talking_heads -m
"""

from typing import Literal

import torch
from torch import Tensor, nn

from lm.kinds import Activations, AttentionConfig, Context, Linear, Mixer, NormConfig, Out, PerToken


class TalkingHeadsConfig(AttentionConfig):
    """after softmax(before q k / sqrt(c)) v, where two learned matrices mix the heads; at first they leave them alone."""

    kind: Literal["talking_heads"] = "talking_heads"

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return TalkingHeads(self, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        return 4 * d_model * seq_len + 4 * self.n_heads**2 * seq_len

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        return Activations(0, 4 * d_model)

    def saved_scores(self, seq_len: int, device: str) -> Activations:
        return Activations(0, 4 * self.n_heads * seq_len, 2 * seq_len)  # scores and weights, each before and after they are mixed

    def state(self, d_model: int, layer: int) -> PerToken:
        return PerToken(((self.n_heads, self.rotary_width(d_model)),) * 2)


class TalkingHeads(Mixer):
    """Project, rotate, cache, mix, weigh, mix, project."""

    initializers = dict.fromkeys(("before", "after"), lambda shape, init: torch.eye(shape[0]))

    def __init__(self, cfg: TalkingHeadsConfig, d: int, layer: int) -> None:
        super().__init__(layer)
        self.head_dim = cfg.rotary_width(d)
        self.q, self.k, self.v, self.o = Linear(d, d), Linear(d, d), Linear(d, d), Out(d, d)
        self.before, self.after = (nn.Parameter(torch.empty(cfg.n_heads, cfg.n_heads)) for _ in range(2))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))  # (b, s, d) -> (b, h, s, c)
        q, k = (ctx.position.rotate(each, ctx.angles, self.layer) for each in (q, k))
        if ctx.cache is not None:
            k, v = ctx.cache.append(self.layer, k, v)  # as `state` has declared them; gives all that the tokens may see, (b, h, k, c)
        mask = ctx.keys(self.layer)  # after `append`
        seen, bias = mask.allowed(None), ctx.position.bias_of_layer(mask.q_positions, mask.k_positions, self.layer)  # None: no window
        scores = torch.einsum("bhqk,gh->bgqk", q @ k.mT / self.head_dim**0.5, self.before)
        weights = (scores if bias is None else scores + bias).masked_fill(~seen, float("-inf")).softmax(-1)
        weights = torch.einsum("bhqk,gh->bgqk", weights.masked_fill(~seen, 0.0), self.after)  # 0, not NaN, where nothing is seen
        return self.o((weights @ v).transpose(1, 2).flatten(2))  # (b, h, q, c) -> (b, q, h*c)
