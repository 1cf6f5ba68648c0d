"""Grouped-query attention that changes queries and keys once more behind the rotation."""

from typing import TYPE_CHECKING

from torch import Tensor

from lm.nn.context import Context
from lm.nn.mixers.grouped import GQA, GroupedConfig
from lm.nn.norm import NormConfig

if TYPE_CHECKING:
    from lm.nn.mixers.gqa import GQAConfig


class RotatedNormGQA(GQA):
    """GQA whose norms on each head's queries and keys stand behind the rotation."""

    def queries(self, x: Tensor) -> Tensor:
        return self._heads(self.q(x))

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._heads(self.k(x)), self._heads(self.v(x))

    def projected(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(x, ctx)
        return self.q_norm(q), self.k_norm(k), v


class L2NormGQA(GQA):
    """GQA whose heads of queries and keys have norms without weights behind the rotation, where there is one.  Llama 4, Meta 2025."""

    def __init__(self, cfg: GroupedConfig, norm: NormConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, norm, d_model, layer)
        self.l2_norm = norm.build_l2(self.head_dim)

    def projected(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(x, ctx)
        return (self.l2_norm(q), self.l2_norm(k), v) if ctx.position.rotates(self.layer) else (q, k, v)


class GrowingGQA(GQA):
    """GQA whose queries grow with their position."""

    def __init__(self, cfg: "GQAConfig", norm: NormConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, norm, d_model, layer)
        assert cfg.query_growth is not None
        self.growth = cfg.query_growth

    def projected(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(x, ctx)
        return self.growth.grown(q, ctx, self.layer), k, v


class GrowingL2NormGQA(GrowingGQA, L2NormGQA):
    """Both: in Llama 4 layers that rotate have the norms, and in the others queries grow."""
