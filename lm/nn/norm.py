"""Normalisation, and where on the residual stream it happens."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.init import Declares, Initializer, zeros
from lm.ops.norm import fast_rms_norm
from lm.schema import Slot

Place = Literal["pre", "post", "sandwich", "output"]


class NormConfig(Slot, group="model/norm"):
    """A norm over the last dimension, and where it stands."""

    place: Place = "pre"
    """Where a sublayer f is normalised: pre x+f(n(x)), post n(x+f(x)), sandwich x+n(f(n(x))), output x+n(f(x))."""

    @abstractmethod
    def build(self, d: int) -> nn.Module:
        """Returns the norm of vectors of width d: a module from (..., d) to (..., d)."""

    def build_l2(self, d: int) -> nn.Module:
        """Returns x / rms(x) of vectors of width d, without a weight, with the eps of this norm where it has one."""
        return BareRMSNorm(d, 1e-6)


class RMSNormConfig(NormConfig):
    """x / rms(x) * weight."""

    kind: Literal["rms"] = "rms"
    eps: float = Field(1e-6, ge=1e-30)
    """Added to the mean square before the root."""
    weight: bool = True
    """Learn a factor on each channel (false in nanochat)."""
    zero_centered: bool = False
    """The learned weight is the difference from 1 (Gemma)."""

    @model_validator(mode="after")
    def _weight_is_there(self) -> Self:
        require_weight(self.weight, zero_centered=self.zero_centered)
        return self

    def build(self, d: int) -> nn.Module:
        if not self.weight:
            return BareRMSNorm(d, self.eps)
        return ZeroCenteredRMSNorm(d, self.eps) if self.zero_centered else RMSNorm(d, self.eps)

    def build_l2(self, d: int) -> nn.Module:
        return BareRMSNorm(d, self.eps)


class LayerNormConfig(NormConfig):
    """(x - mean) / std * weight + bias."""

    kind: Literal["layer"] = "layer"
    eps: float = Field(1e-5, ge=1e-30)
    """Added to the variance before the root."""
    bias: bool = True
    """Learn an additive bias beside the weight (false in PaLM)."""
    weight: bool = True
    """Learn a factor on each channel (false in OLMo 1, which has no bias either)."""
    zero_centered: bool = False
    """The learned weight is the difference from 1 (Nemotron)."""

    @model_validator(mode="after")
    def _weight_is_there(self) -> Self:
        require_weight(self.weight, zero_centered=self.zero_centered, bias=self.bias)
        return self

    def build(self, d: int) -> nn.Module:
        if not self.weight:
            return nn.LayerNorm(d, self.eps, elementwise_affine=False)
        return (ZeroCenteredLayerNorm if self.zero_centered else nn.LayerNorm)(d, self.eps, bias=self.bias)

    def build_l2(self, d: int) -> nn.Module:
        return BareRMSNorm(d, self.eps)


def build_within(cfg: NormConfig | None, d: int) -> nn.Module:
    """Returns the norm before a sublayer's last matrix, of vectors of width d."""
    return nn.Identity() if cfg is None else cfg.build(d)


def require_within(**norms: NormConfig | None) -> None:
    """Raises ValueError for the first norm within a sublayer that has a place around it.  norms: by option."""
    for name, norm in norms.items():
        if norm is not None and norm.place != "pre":
            raise ValueError(f"{name}.place={norm.place} is of norms around a sublayer, and this one is within. Leave place out.")


def require_weight(weight: bool, **beside: bool) -> None:
    """Raises ValueError for the first option of `beside` that is true where there is no weight, which it needs."""
    if wrong := [name for name, wanted in beside.items() if wanted and not weight]:
        raise ValueError(f"weight=false leaves nothing to learn, and {wrong[0]}=true. Set {wrong[0]}=false, or weight=true.")


class BareRMSNorm(nn.Module):
    """rms_norm without a weight."""

    def __init__(self, d: int, eps: float) -> None:
        super().__init__()
        self.d, self.eps = d, eps

    def gain(self) -> Tensor:
        """Returns what each element is multiplied by, (d,)."""
        return torch.ones(self.d)

    def forward(self, x: Tensor) -> Tensor:
        return fast_rms_norm(x, None, self.eps)

    def extra_repr(self) -> str:
        return str(self.d)


class RMSNorm(BareRMSNorm):
    """rms_norm with a learned weight of ones."""

    def __init__(self, d: int, eps: float) -> None:
        super().__init__(d, eps)
        self.weight = nn.Parameter(torch.ones(d))

    def gain(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return fast_rms_norm(x, self.gain(), self.eps)


class ZeroCenteredRMSNorm(Declares, RMSNorm):
    """x / rms(x) * (1 + weight), with weights of zeros at first.  Gemma, arXiv:2403.08295."""

    initializers = {"weight": zeros}

    def gain(self) -> Tensor:
        return 1.0 + self.weight


class ZeroCenteredLayerNorm(Declares, nn.LayerNorm):
    """(x - mean) / std * (1 + weight) + bias, with weights of zeros at first.  Nemotron-4, arXiv:2402.16819."""

    initializers = {"weight": zeros}

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, 1.0 + self.weight, self.bias, self.eps)


Sublayer = Callable[[Tensor], Tensor]


def skipped(x: Tensor, p: float) -> Tensor:
    """x / (1 - p), or zeros in whole rows, each with probability p.  x: (b, ...).

    Stochastic depth, Huang et al. 2016, arXiv:1603.09382, eq. 2; the paper multiplies by 1 - p afterwards instead. Rows are drawn for, and
    not the layer for all of them: every layer runs on every rank, so that exchanges of weights and gradients go on, and saves no time.
    """
    kept = torch.rand(len(x), dtype=torch.float32, device=x.device) >= p
    return x * (kept / (1 - p)).to(x.dtype).view(-1, *[1] * (x.ndim - 1))


class Branch(nn.Dropout):
    """Dropout and a factor on what a sublayer adds to the residual stream, and in training nothing added to some rows."""

    def __init__(self, dropout: float, scale: float = 1.0, skip: float = 0.0) -> None:
        """skip: the probability that nothing is added to a row."""
        super().__init__(dropout)
        self.scale, self.skip = scale, skip

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = super().forward(x)
            x = skipped(x, self.skip) if self.skip else x
        return x if self.scale == 1.0 else x * self.scale


class LayerScale(Declares, Branch):
    """gain * f(x), with a learned gain of each channel.  Touvron et al. 2021, arXiv:2103.17239, section 2."""

    def __init__(self, dropout: float, scale: float, skip: float, d: int, start: float) -> None:
        """start: the initial value of all gains."""
        super().__init__(dropout, scale, skip)
        self.gain, self.d, self.start = nn.Parameter(torch.empty(d)), d, start

    def named_initializers(self) -> Mapping[str, Initializer]:
        return {"gain": lambda shape, init: torch.full(shape, self.start)}

    def extra_repr(self) -> str:
        return str(self.d)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class PreNorm(nn.Module):
    """x + f(norm(x)).  Xiong et al. 2020, arXiv:2002.04745."""

    def __init__(self, cfg: NormConfig, d: int, branch: Branch) -> None:
        super().__init__()
        self.norm: nn.Module = cfg.build(d)
        self.branch = branch

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        return x + self.added(x, sublayer)

    def added(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        """Returns what is added to the stream."""
        out: Tensor = self.branch(sublayer(self.norm(x)))
        return out


class PostNorm(PreNorm):
    """norm(x + f(x)).  Vaswani et al. 2017, arXiv:1706.03762."""

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        out: Tensor = self.norm(x + self.branch(sublayer(x)))
        return out


class OutputNorm(PreNorm):
    """x + norm(f(x)).  OLMo 2, arXiv:2501.00656, section 2.1."""

    def added(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        out: Tensor = self.branch(self.norm(sublayer(x)))
        return out


class SandwichNorm(PreNorm):
    """x + norm_out(f(norm(x))).  Gemma 2, arXiv:2408.00118, section 2."""

    def __init__(self, cfg: NormConfig, d: int, branch: Branch) -> None:
        super().__init__(cfg, d, branch)
        self.norm_out = cfg.build(d)

    def added(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        out: Tensor = self.branch(self.norm_out(sublayer(self.norm(x))))
        return out


RESIDUALS: dict[Place, type[PreNorm]] = {"pre": PreNorm, "post": PostNorm, "output": OutputNorm, "sandwich": SandwichNorm}


def build_residual(cfg: NormConfig, d: int, branch: Branch) -> PreNorm:
    """The residual connection that `cfg.place` names."""
    return RESIDUALS[cfg.place](cfg, d, branch)
