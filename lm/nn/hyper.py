"""Hyper-connections: several residual streams, which each sublayer reads, writes and mixes by weights that depend on the token.

Zhu et al. 2024, arXiv:2409.19606; mixed by doubly stochastic matrices (mHC): Xie et al. 2025, arXiv:2512.24880, as in DeepSeek-V4.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.activation_memory import Activations
from lm.nn.init import Declares, InitContext, Initializer, zero_scores
from lm.nn.norm import NormConfig, PreNorm, Sublayer
from lm.nn.residual import LayerFn, Residual, ResidualConfig
from lm.ops.precision import wide, without_autocast
from lm.schema import MOST


class HyperConfig(ResidualConfig):
    """Several streams, mixed by doubly stochastic matrices that depend on the token."""

    kind: Literal["hyper"] = "hyper"
    streams: int = Field(4, gt=1, le=MOST)
    """Residual streams."""
    sinkhorn: int = Field(20, gt=0, le=1000)
    """Times that columns and rows of a mixing matrix are divided by their sums."""
    eps: float = Field(1e-6, ge=1e-30)
    """Added to these sums, to the weights of reading, and to the mean square of the streams."""

    def build(self, d_model: int, n_layers: int) -> Residual:
        return HyperResidual(self, d_model)

    def connect(self, sublayer: PreNorm, d_model: int, nth: int) -> nn.Module:
        return HyperConnection(self, sublayer, d_model, nth)

    def require(self, norm: NormConfig, block: str, drafts: bool, n_layers: int) -> None:
        if norm.place == "post":
            raise ValueError("residual=hyper leaves no sum that norm.place=post could normalise. Use place=pre, sandwich or output.")
        if block == "parallel":
            raise ValueError(f"residual=hyper joins one sublayer after the other, and block={block} has no such. Use block=sequential.")
        if drafts:
            raise ValueError("mtp reads one residual stream, and residual=hyper has several. Set mtp=null, or residual=plain.")

    def width(self, d_model: int) -> int:
        return self.streams * d_model

    def saved_activations(self, d_model: int, sublayers: int) -> Activations:
        n, streams = self.streams, self.width(d_model)
        weights, divided = 2 * n * n + 5 * n, 2 * self.sinkhorn * (n * n + n)
        wide = 2 * streams + d_model + weights + divided  # the streams, their norm, and what the sublayer gives
        return Activations(sublayers * wide, 0, recomputed_wide=sublayers * (streams + divided))

    def saved_between_blocks(self, d_model: int, n_layers: int) -> Activations:
        return Activations(2 * self.width(d_model), 0)  # the streams, and their norm

    def flops(self, d_model: int, n_layers: int, sublayers: int) -> int:
        n = self.streams
        return 2 * n * d_model * (n_layers * sublayers * (n * n + 3 * n + 1) + n + 1)


class HyperWeights(Declares, nn.Module):
    """a W rms_norm(x) + b of each token in float32: W is 0 and a is 1/100 at first."""

    def __init__(self, cfg: HyperConfig, d_model: int, sizes: Sequence[int], start: list[float]) -> None:
        """sizes: how many weights share a factor a.  start: b at first."""
        super().__init__()
        self.cfg, self.sizes, self.start, self.width = cfg, list(sizes), start, cfg.width(d_model)
        self.weight = nn.Parameter(torch.empty(sum(sizes), self.width))
        self.bias, self.scale = nn.Parameter(torch.empty(sum(sizes))), nn.Parameter(torch.empty(len(sizes)))

    def named_initializers(self) -> Mapping[str, Initializer]:
        return {"weight": zero_scores, "bias": lambda shape, init: torch.tensor(self.start), "scale": hundredths}

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(b, s, n, d) -> (b, s, size) of each size."""
        x = wide(x).flatten(2)
        logits = F.linear(F.rms_norm(x, x.shape[-1:], eps=self.cfg.eps), wide(self.weight)).split(self.sizes, -1)
        biases, scales = wide(self.bias).split(self.sizes), wide(self.scale).unbind()
        return tuple(scale * each + bias for each, scale, bias in zip(logits, scales, biases, strict=True))

    def extra_repr(self) -> str:
        return f"{self.width} -> {sum(self.sizes)}"


def hundredths(shape: torch.Size, init: InitContext) -> Tensor:
    """1/100: how much weights depend on the token at first (mHC)."""
    return torch.full(shape, 0.01)


def doubly_stochastic(logits: Tensor, times: int, eps: float) -> Tensor:
    """exp(logits) with rows and columns that sum to 1, by dividing both by their sums in turn (Sinkhorn & Knopp 1967).  (.., n, n)."""
    x = logits.softmax(-1) + eps
    x = x / (x.sum(-2, keepdim=True) + eps)
    for _ in range(times - 1):
        x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x


class HyperConnection(nn.Module):
    """x_j = sum_i m_ij x_i + w_j f(sum_i r_i x_i), with r from sigmoid, w from 2 sigmoid, and m doubly stochastic.

    At first a sublayer reads one stream more than the others, each the next one; writes to all; and mixes hardly any.
    """

    def __init__(self, cfg: HyperConfig, sublayer: PreNorm, d_model: int, nth: int) -> None:
        super().__init__()
        n = cfg.streams
        read = [1.0 if i == nth % n else -1.0 for i in range(n)]
        mix = [0.0 if i == j else -8.0 for i in range(n) for j in range(n)]
        self.cfg, self.sublayer = cfg, sublayer
        self.weights = HyperWeights(cfg, d_model, (n, n, n * n), [*read, *[0.0] * n, *mix])

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        """(b, s, n, d) -> (b, s, n, d)."""
        with without_autocast(x.device):  # the streams stay in their dtype
            read, write, mix = self.weights(x)
            mixed = doubly_stochastic(mix.unflatten(-1, (-1, self.cfg.streams)), self.cfg.sinkhorn, self.cfg.eps)
            h = summed(x, read.sigmoid() + self.cfg.eps)
        out = self.sublayer.added(h, sublayer)
        with without_autocast(x.device):
            return (2 * write.sigmoid()).to(x.dtype).unsqueeze(-1) * out.unsqueeze(2) + mixed.to(x.dtype).mT @ x


class HyperResidual(Residual):
    """Streams that are the embedding at first, and whose weighted sum is the output."""

    def __init__(self, cfg: HyperConfig, d_model: int) -> None:
        super().__init__()
        self.cfg, self.weights = cfg, HyperWeights(cfg, d_model, (cfg.streams,), [0.0] * cfg.streams)

    def forward(self, x: Tensor, layers: Sequence[LayerFn]) -> Tensor:
        streams = super().forward(x.unsqueeze(2).expand(-1, -1, self.cfg.streams, -1).contiguous(), layers)
        with without_autocast(x.device):
            (read,) = self.weights(streams)
            return summed(streams, read.sigmoid() + self.cfg.eps)


def summed(streams: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted sum of the streams, (b, s, d).  streams: (b, s, n, d); weights: (b, s, n)."""
    return (weights.unsqueeze(-2) @ wide(streams)).squeeze(-2).to(streams.dtype)
