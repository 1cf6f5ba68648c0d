"""Forgetting attention.  Lin et al. 2025, arXiv:2503.02130."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.nn.context import Context
from lm.nn.linear import Linear
from lm.nn.mixers.grouped import GQA, GroupedConfig
from lm.nn.norm import NormConfig
from lm.ops.attention.forget import faded
from lm.ops.precision import wide
from lm.ops.ranks.tensor_parallel import Divisible


class ForgettingGQA(GQA):
    """GQA whose scores fade by learned gates. A cache keeps the gates and not their sums, which bf16 would round to whole numbers."""

    cut = {**GQA.cut, **Divisible.cut_by(("forget",), "o")}

    def __init__(self, cfg: GroupedConfig, norm: NormConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, norm, d_model, layer)
        self.forget = Linear(d_model, cfg.n_heads, bias=True)

    def prepare(self, ctx: Context, rows: int) -> None:
        """Its bias is of this layer's input, and takes no form before that is there."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v = self.projected(x, ctx)
        gates = F.logsigmoid(wide(self.forget(x))).transpose(1, 2)  # (b, s, h) -> (b, h, s)
        if ctx.cache is not None:
            kept, logs = ctx.cache.append(self.layer, torch.cat([k, v], dim=1), gates.unsqueeze(-1))  # (b, 2g, k, c), (b, h, k, 1)
            (k, v), gates = kept.chunk(2, dim=1), wide(logs.squeeze(-1))
        mask = ctx.keys(self.layer)
        fading, bias = faded(gates, mask), self.bias(mask, ctx.position)
        return self.output(x, self.attended(q, k, v, mask, fading if bias is None else fading + bias))
