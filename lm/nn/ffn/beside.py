"""A dense feed-forward and a mixture of experts side by side."""

from typing import Literal, Self

from pydantic import model_validator
from torch import Tensor, nn

from lm.nn.activation_memory import Activations, sum_activations
from lm.nn.context import Context
from lm.nn.ffn.mlp import MLPConfig
from lm.nn.ffn.moe import MixtureConfig, MoE
from lm.nn.norm import NormConfig, require_within
from lm.schema import Tree


class BesideConfig(MixtureConfig):
    """A dense feed-forward in every layer, and experts beside it; each reads the residual stream through a norm of its own, and has one
    behind it (Gemma 4, Google 2026)."""

    kind: Literal["beside"] = "beside"
    norms_itself = True
    mlp: MLPConfig
    """The dense feed-forward."""
    norms: NormConfig
    """The four norms. That of the block in front of them is left out; the router reads the residual stream itself."""

    @model_validator(mode="after")
    def _stands_alone(self) -> Self:
        require_within(norms=self.norms)
        if self.mlp.last is not None:
            raise ValueError("mlp.last has no form beside experts. Set it to null.")
        others = {"n_shared": self.n_shared, "latent_dim": self.latent_dim, "out_norm": self.out_norm, "dense": self.dense}
        if given := [name for name, value in others.items() if value]:
            raise ValueError(f"{given[0]} has no form in ffn=beside, whose mlp every token passes. Leave it out, or use ffn=moe.")
        return self

    def build(self, d_model: int, layer: int) -> nn.Module:
        return BesideMoE(self, d_model, layer)

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Counts in addition what the norms read and give."""
        parts = super().saved_activations(d_model, layer), self.mlp.saved_activations(d_model, layer)
        return sum_activations([*parts, Activations(d_model, 2 * d_model)])

    def why_not_tensor_parallel(self, d_model: int, n: int) -> str | None:
        return "model.ffn.norms read what all experts give, of which a rank has some. Use ffn=moe"

    def implied(self, d_model: int) -> Tree:
        return super().implied(d_model) | {f"mlp.{name}": value for name, value in self.mlp.implied(d_model).items()}


class BesideMoE(MoE):
    """norm(mlp(norm(x))) + norm(experts(norm(x))); the router reads x."""

    def __init__(self, cfg: BesideConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, d_model, layer)
        self.mlp = cfg.mlp.build(d_model, layer)
        self.mlp_norm, self.mlp_norm_out, self.experts_norm, self.experts_norm_out = (cfg.norms.build(d_model) for _ in range(4))

    def read(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts_norm(x)
        return out

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        dense: Tensor = self.mlp_norm_out(self.mlp(self.mlp_norm(x), ctx))
        return dense + self.experts_norm_out(super().forward(x, ctx))
