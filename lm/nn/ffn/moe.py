"""Mixture of experts: each token passes a few of many feed-forward layers.  Shazeer et al. 2017, arXiv:1701.06538."""

from collections.abc import Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from lm.nn.activation_memory import Activations, sum_activations
from lm.nn.context import Context
from lm.nn.ffn.base import FFNConfig, Mixture
from lm.nn.ffn.experts import Experts
from lm.nn.ffn.mlp import LEARNED, MLPConfig
from lm.nn.ffn.router import RouterConfig, Routing, SoftmaxRouterConfig
from lm.nn.linear import Linear, Out
from lm.nn.norm import NormConfig, require_within
from lm.ops.routing import agreement, capacity_of, loads, squares_of_log_z, tokens, within_capacity
from lm.schema import MOST, Tree


class MixtureConfig(FFNConfig):
    """What kinds with experts are configured by."""

    n_experts: int = Field(gt=1, le=MOST)
    """Experts of a layer."""
    top_k: int = Field(gt=0)
    """Experts of a token."""
    expert: MLPConfig
    """One expert."""
    router: RouterConfig = SoftmaxRouterConfig()
    weigh_inputs: bool = False
    """A token's weights multiply what its experts read, and not what they give (Llama 4)."""
    n_shared: int = Field(0, ge=0, le=MOST)
    """Experts' worth of width that every token passes beside its own (DeepSeek)."""
    shared_hidden: int | None = Field(None, gt=0, le=MOST)
    """Width of the shared expert of n_shared=1 (Qwen2-MoE). null: n_shared times that of an expert."""
    shared_gate: bool = False
    """What the shared expert gives is multiplied by the sigmoid of a projection to one number (Qwen2-MoE, Qwen3-Next)."""
    latent_dim: int | None = Field(None, gt=0, le=MOST)
    """Experts read a projection of the tokens to this width, and what they give together is projected back (Nemotron 3 Super: 1024;
    arXiv:2512.20856). null: they read the tokens."""
    out_norm: NormConfig | None = None
    """A norm of what experts and shared experts give together; layers without experts have none (A.X K1: rms). null: there is none."""
    dense: MLPConfig | None = None
    """The feed-forward of layers without experts. null: there are none."""
    first_dense: int = Field(0, ge=0)
    """The first layers that are dense (DeepSeek)."""
    every: int = Field(1, gt=0)
    """Experts in every n-th layer only (layer n-1, 2n-1, ...; Switch: 2)."""
    capacity: int | None = Field(None, gt=0, le=MOST)
    """Tokens of one row that an expert takes; those beyond it are dropped and keep their residual. null: by capacity_factor."""
    capacity_factor: float | None = Field(None, gt=0)
    """The same as a multiple of an even share of the row's tokens (Fedus et al. 2021, arXiv:2101.03961, eq. 3), padding left out.
    null: nothing is dropped."""
    balance_loss: float = Field(0.0, ge=0)
    """Factor on e sum_i f_i p_i, f_i the part of a row's choices and p_i the mean score of expert i (the same, eqs. 4 to 6)."""
    router_z_loss: float = Field(0.0, ge=0)
    """Factor on the mean square of the router's logsumexp (Zoph et al. 2022, arXiv:2202.08906, eq. 5)."""
    reference: bool = False
    """Loop over the experts instead of the grouped path, to compare the two."""

    @model_validator(mode="after")
    def _numbers_fit(self) -> Self:
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k={self.top_k} is over n_experts={self.n_experts}. Lower top_k, or add experts.")
        if self.capacity is not None and self.capacity_factor is not None:
            raise ValueError(f"capacity={self.capacity} and capacity_factor={self.capacity_factor} say the same twice. Set one of them.")
        if (self.first_dense > 0 or self.every > 1) and self.dense is None:
            raise ValueError(f"first_dense={self.first_dense} and every={self.every} leave dense layers. Set dense.hidden for them.")
        if self.first_dense == 0 and self.every == 1 and self.dense is not None:
            raise ValueError("dense has no effect where every layer has experts. Drop it, or set first_dense or every.")
        if (self.shared_hidden is not None and self.n_shared != 1) or (self.shared_gate and not self.n_shared):
            raise ValueError(f"shared_hidden and shared_gate are of a shared expert, and n_shared={self.n_shared}. Set n_shared=1.")
        if self.top_k == 1 and self.router.normalize:
            raise ValueError("top_k=1 makes the one weight of each token 1 whatever its score, so that the router learns nothing."
                             " Set router.normalize=false, or raise top_k.")  # fmt: skip
        if self.expert.activation in LEARNED:
            raise ValueError(f"expert.activation={self.expert.activation} has weights, and experts have none for it. Choose another one.")
        if self.expert.inner_norm is not None:
            raise ValueError("expert.inner_norm has no form in the stacked matrices of experts. Set expert.inner_norm=null.")
        for name, part in (("expert", self.expert), ("dense", self.dense)):
            if part is not None and part.last is not None:
                raise ValueError(f"{name}.last is of layers that all have one feed-forward. Set {name}.last=null.")
        require_within(out_norm=self.out_norm)
        if self.weigh_inputs and self.expert.bias:
            raise ValueError("weigh_inputs=true lets an expert read nothing of a token that it drops, and expert.bias=true would answer."
                             " Set one of them to false.")  # fmt: skip
        self.router.require(self.n_experts, self.top_k)
        return self

    def inner(self, d_model: int) -> int:
        """Returns the width of what experts read and give."""
        return self.latent_dim or d_model

    def shared(self, d_model: int) -> MLPConfig | None:
        """Returns the feed-forward that every token passes beside its experts."""
        width = self.shared_hidden or self.n_shared * self.expert.width(self.inner(d_model))
        return self.expert.replace(hidden=width) if self.n_shared else None

    def is_dense(self, layer: int) -> bool:
        """True where this layer has no experts."""
        return layer < self.first_dense or (layer + 1) % self.every != 0

    def build(self, d_model: int, layer: int) -> nn.Module:
        plain = self._mlp(layer)
        if plain is not None:
            return plain.build(d_model, layer)
        return MoE(self, d_model, layer) if self.out_norm is None else NormedMoE(self, self.out_norm, d_model, layer)

    def require(self, layers: Sequence[int]) -> None:
        if all(self.is_dense(layer) for layer in layers):
            raise ValueError(f"ffn.first_dense={self.first_dense} and ffn.every={self.every} leave no layer of {len(layers)} with"
                             " experts. Lower them, or use ffn=mlp.")  # fmt: skip

    def why_not_context_parallel(self) -> str | None:
        if self.capacity is None and self.capacity_factor is None:
            return None
        return "ffn.capacity counts the tokens of a whole row that come before. Leave ffn.capacity and ffn.capacity_factor out"

    def why_not_tensor_parallel(self, d_model: int, n: int) -> str | None:
        if self.out_norm is not None:
            return "model.ffn.out_norm reads what all experts give, of which a rank has some. Set it to null"
        if self.n_experts % n:
            return f"model.ffn.n_experts={self.n_experts} is not a multiple of it, and each rank has as many. Choose one"
        shared = "shared_hidden" if self.shared_hidden else "n_shared * expert.hidden"
        parts = {shared: self.shared(d_model), "dense.hidden": self.dense}
        found = [part.why_not_tensor_parallel(d_model, n, name) for name, part in parts.items() if part is not None]
        return next(filter(None, found), None)

    def exchanged_activations(self, d_model: int, layer: int, n: int) -> Activations:
        """Counts the output that comes back from each of a token's experts, and the gathered input of the shared experts."""
        if (plain := self._mlp(layer)) is not None:
            return plain.exchanged_activations(d_model, layer, n)
        shared = self.shared(d_model)
        gathered = [] if shared is None else [shared.exchanged_activations(d_model, layer, n)]
        return sum_activations([Activations(0, self.top_k * self.inner(d_model)), *gathered])

    def flops(self, d_model: int, layer: int) -> int:
        """Counts the experts that a token is sent to."""
        return 2 * self.top_k * self.expert.weights(self.inner(d_model)) if self._mlp(layer) is None else 0

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Counts, for each chosen expert, its activations, input and output; the router's input and three rows of scores in float32; and
        what is projected back."""
        if (plain := self._mlp(layer)) is not None:
            return plain.saved_activations(d_model, layer)
        shared, gated, inner = self.shared(d_model), d_model + 2 if self.shared_gate else 0, self.inner(d_model)
        passed = [self.expert.saved_activations(inner, layer)] * self.top_k
        passed += [] if shared is None else [shared.saved_activations(d_model, layer)]
        normed = 0 if self.out_norm is None else d_model
        narrow = 2 * self.top_k * inner + gated + (self.latent_dim or 0) + normed
        return sum_activations([Activations(d_model + 3 * self.n_experts, narrow, recomputed_wide=d_model), *passed])

    def kernel_outputs(self, d_model: int, layer: int) -> Activations:
        """Counts, for each chosen expert, the output of each of its matrices."""
        if self._mlp(layer) is not None:
            return Activations(0, 0)
        inner = self.inner(d_model)
        return Activations(0, self.top_k * ((1 + self.expert.gated) * self.expert.width(inner) + inner))

    def implied(self, d_model: int) -> Tree:
        hidden = {"expert.hidden": self.expert.width(self.inner(d_model))}
        hidden |= {} if self.dense is None else {"dense.hidden": self.dense.width(d_model)}
        shared, first = self.shared(d_model), self.first_dense - self.first_dense % self.every  # less what `every` leaves out anyway
        return {**hidden, "shared_hidden": None if shared is None else shared.hidden, "first_dense": first}

    def _mlp(self, layer: int) -> MLPConfig | None:
        """Returns the feed-forward of a layer without experts; None for a layer with experts."""
        return self.dense if self.is_dense(layer) else None


class MoEConfig(MixtureConfig):
    """Top-k routing to experts; some layers may stay dense."""

    kind: Literal["moe"] = "moe"


class MoE(Mixture):
    """sum over a token's experts of weight * expert(x), plus the shared experts."""

    def __init__(self, cfg: MixtureConfig, d_model: int, layer: int) -> None:
        super().__init__()
        self.cfg, self.layer = cfg, layer
        self.router = cfg.router.build(d_model, cfg.n_experts, cfg.top_k)
        inner, latent = cfg.inner(d_model), cfg.latent_dim is not None
        self.experts = Experts(cfg.expert, cfg.n_experts, inner, cfg.reference, last=not latent)
        self.latent_down = Linear(d_model, inner, bias=False) if latent else None
        self.latent_up = Out(inner, d_model, bias=False) if latent else None
        shared = cfg.shared(d_model)
        self.shared = None if shared is None else shared.build(d_model, layer)
        self.shared_gate = Linear(d_model, 1, bias=False) if cfg.shared_gate else None

    def extra_repr(self) -> str:
        return f"{self.cfg.top_k} of {self.cfg.n_experts}"

    def idle(self) -> int:
        """Counts the weights of the experts that a token is not sent to."""
        n, k = self.cfg.n_experts, self.cfg.top_k
        return sum(p.numel() for p in self.experts.parameters()) * (n - k) // n

    def balance(self, load: Tensor) -> None:
        self.router.balance(load)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        routing, cfg = self.router(x), self.cfg
        real = (ctx.positions >= 0).expand(x.shape[:2])
        capacity: Tensor | int | None = cfg.capacity
        if cfg.capacity_factor is not None:
            capacity = capacity_of(real, cfg.top_k, cfg.n_experts, cfg.capacity_factor)
        weights = routing.weights
        if capacity is not None:
            weights = weights * within_capacity(routing.experts, real, cfg.n_experts, capacity)
        out = (self._weigh_inputs if cfg.weigh_inputs else self._weigh_outputs)(self.read(x), routing.experts, weights.to(x.dtype))
        out = out if self.latent_up is None else self.latent_up(out)  # (b, s, l) -> (b, s, d)
        self._report(routing, real, ctx)
        if self.shared is None:
            return out
        shared: Tensor = self.shared(x, ctx)
        return out + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())

    def read(self, x: Tensor) -> Tensor:
        """Returns what experts read, (b, s, d) -> (b, s, l)."""
        return x if self.latent_down is None else self.latent_down(x)

    def _weigh_outputs(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """(b, s, d) and twice (b, s, k) -> (b, s, d)."""
        out: Tensor = self.experts(x.flatten(0, 1), experts.flatten(0, 1), weights.flatten(0, 1))
        return out.view_as(x)

    def _weigh_inputs(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """As `_weigh_outputs`: each choice of a token is a token of its own, whose expert reads it times its weight."""
        rows = (x.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(0, 2)  # (b, s, k, d) -> (b*s*k, d)
        out: Tensor = self.experts(rows, experts.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        return out.view(*weights.shape, -1).sum(-2)  # (b*s*k, d) -> (b, s, d)

    def _report(self, routing: Routing, real: Tensor, ctx: Context) -> None:
        """Reports losses per row, so that no split into micro-batches or slices changes them, and loads of the batch; without padding."""
        cfg, total = self.cfg, ctx.mask.sharding.all_reduce
        counts = loads(routing.experts, real, cfg.n_experts)
        ctx.report_loads(counts.sum(0))
        if not cfg.balance_loss and not cfg.router_z_loss:
            return
        n, losses = tokens(real, total), []
        if cfg.balance_loss:
            losses.append(cfg.balance_loss * cfg.n_experts * agreement(counts, routing.probabilities, real, n, cfg.top_k, total))
        if cfg.router_z_loss:
            losses.append(cfg.router_z_loss * squares_of_log_z(routing.logits, real, total) / n)
        ctx.report_loss("router_loss", torch.stack(losses).sum(0))


class NormedMoE(MoE):
    """norm(MoE(x))."""

    def __init__(self, cfg: MixtureConfig, norm: NormConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, d_model, layer)
        self.out_norm = norm.build(d_model)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        out: Tensor = self.out_norm(super().forward(x, ctx))
        return out
