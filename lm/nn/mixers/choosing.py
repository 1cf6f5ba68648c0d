"""Grouped-query attention to what an indexer has chosen."""

import torch
from torch import Tensor

from lm.nn.context import Context
from lm.nn.mixers.grouped import GQA, GroupedConfig
from lm.nn.mixers.indexer import Choosing, IndexerConfig
from lm.nn.norm import NormConfig


class ChoosingGQA(Choosing, GQA):
    """GQA whose indexer makes its queries of the layer's input."""

    def __init__(self, cfg: GroupedConfig, indexer: IndexerConfig, norm: NormConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, norm, d_model, layer)
        self.add_indexer(indexer, d_model, d_model)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        (q, k, v), keys = self.projected(x, ctx), [*self.index_keys(x, ctx)]
        if ctx.cache is not None:
            kept, *keys = ctx.cache.append(self.layer, torch.cat([k, v], dim=1), *keys)  # (b, 2g, k, c), (b, 1, k, c)
            k, v = kept.chunk(2, dim=1)
        return self.output(x, self.of_chosen(x, x, keys, (q, k, v), ctx))
