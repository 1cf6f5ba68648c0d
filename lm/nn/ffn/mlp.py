"""Position-wise feed-forward layers."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.activation_memory import Activations
from lm.nn.context import Context
from lm.nn.ffn.base import FFNConfig
from lm.nn.init import Declares, InitContext
from lm.nn.linear import Linear, Out
from lm.nn.norm import NormConfig, build_within, require_within
from lm.ops.ranks.tensor_parallel import Divisible
from lm.schema import MOST, MOST_LAYERS, Config, Tree

Activation = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "relu2", "xielu"]


class LastLayers(Config):
    """The last layers of a stack have another inner width (Gemma 4: those that read other layers' keys, twice as wide)."""

    n: int = Field(gt=0, le=MOST_LAYERS)
    """How many there are."""
    hidden: int = Field(gt=0, le=MOST)
    """Their inner width."""


class MLPConfig(FFNConfig):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) when gated (Shazeer 2020, arXiv:2002.05202)."""

    kind: Literal["mlp"] = "mlp"
    hidden: int | None = Field(None, gt=0, le=MOST)
    """Inner width. null: 4 d_model, or 8/3 d_model rounded up to a multiple of 64 when gated, so that parameters match."""
    activation: Activation = "silu"
    """relu2 is relu squared (So et al. 2021, arXiv:2109.08668); gelu is exact, gelu_tanh GPT-2's, quick_gelu x sigmoid(1.702 x); xielu
    learns how it rises on both sides (Apertus)."""
    gated: bool = True
    """Multiply by a second projection: silu + gated is SwiGLU, gelu + gated is GeGLU."""
    bias: bool = False
    """Bias on every projection."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an inner activation."""
    inner_norm: NormConfig | None = None
    """A norm of what the last matrix reads (NormFormer: layer, arXiv:2110.09456; Magneto, arXiv:2210.06423; BitNet b1.58: rms). null:
    none."""
    gate_scale: float = Field(1.0, gt=0)
    """Factor on the gate before its activation (Falcon-H1)."""
    last: LastLayers | None = None
    """What is other in the last layers. null: nothing."""
    gpt_oss_limit: float | None = Field(None, gt=0)
    """gpt-oss: gate at most this, up within +- this, and up + 1 as the other factor. null: off."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        require_within(inner_norm=self.inner_norm)
        of_gate = {"gpt_oss_limit": self.gpt_oss_limit, "gate_scale": None if self.gate_scale == 1.0 else self.gate_scale}
        if not self.gated and (given := [(name, value) for name, value in of_gate.items() if value is not None]):
            raise ValueError(f"{given[0][0]}={given[0][1]} has no meaning without a gate. Set gated=true, or drop {given[0][0]}.")
        return self

    def in_layer(self, layer: int, n_layers: int) -> Self:
        if self.last is None:
            return self
        return self.replace(last=None, **({"hidden": self.last.hidden} if layer >= n_layers - self.last.n else {}))

    def require(self, layers: Sequence[int]) -> None:
        if self.last is not None and self.last.n >= len(layers):
            raise ValueError(f"ffn.last.n={self.last.n} is not less than {len(layers)} layers. Lower it, or set ffn.hidden.")

    def width(self, d_model: int) -> int:
        """Inner width f."""
        return self.hidden or (-(-8 * d_model // 3 // 64) * 64 if self.gated else 4 * d_model)

    def build(self, d_model: int, layer: int) -> "MLP":
        return GatedMLP(self, d_model) if self.gated else MLP(self, d_model)

    def weights(self, d_model: int) -> int:
        """Returns how many weights the matrices have."""
        return (3 if self.gated else 2) * d_model * self.width(d_model)

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Counts the activation (xielu's sides too, a byte each); when gated, up and the product too; with gpt_oss_limit, gate and up
        before and after clamping; with inner_norm what it gives. A compiler keeps what the matrices give, and what the last one reads; of
        relu alone the latter, and half a number each for what it cut off."""
        tensors = steps_of(self.activation) + (2 if self.gated else 0) + (2 if self.gpt_oss_limit is not None else 0)
        width, matrices = self.width(d_model), 3 if self.gated else 2
        again = -width // 2 if tensors < matrices else (tensors - matrices) * width
        normed = 0 if self.inner_norm is None else width
        masks, casts = (1 if self.dropout else 0) + (1 if self.activation == "xielu" else 0), d_model if self.gated else 0
        return Activations(0, tensors * width + normed, masks * width, casts, recomputed=again + normed)

    def why_not_tensor_parallel(self, d_model: int, n: int, name: str = "hidden") -> str | None:
        """As in FFNConfig.  name: of the option that sets this width."""
        if self.inner_norm is not None:
            return "model.ffn.inner_norm is of the whole inner width, of which a rank has some. Set it to null"
        widths = {name: self.width(d_model), "last.hidden": 0 if self.last is None else self.last.hidden}
        for key, width in widths.items():
            if width % n:
                return (
                    f"model.ffn.{key}={width} is not a multiple of it, and each rank has as much. Choose one, such as {-(-width // n) * n}"
                )
        return None

    def implied(self, d_model: int) -> Tree:
        return {"hidden": self.width(d_model)}

    def gate(self, act: Callable[[Tensor], Tensor]) -> "Gate":
        """Returns the function that combines gate and up."""
        plain: Gate = partial(_gated, act) if self.gpt_oss_limit is None else partial(_limited, act, self.gpt_oss_limit)
        return plain if self.gate_scale == 1.0 else partial(_scaled, plain, self.gate_scale)


def _gated(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


def _limited(act: Callable[[Tensor], Tensor], limit: float, gate: Tensor, up: Tensor) -> Tensor:
    return act(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + 1)


def _scaled(plain: "Gate", scale: float, gate: Tensor, up: Tensor) -> Tensor:
    return plain(gate * scale, up)


def relu2(x: Tensor) -> Tensor:
    """relu(x)^2."""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x) (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    return x * torch.sigmoid(1.702 * x)


def _softplus_of(value: float, shape: torch.Size, init: InitContext) -> Tensor:
    """What softplus makes this value of."""
    return torch.full(shape, math.log(math.expm1(value)))


class XIELU(Declares, nn.Module):
    """a x^2 + x / 2 above 0, b (e^x - 1 - x) + x / 2 below; each layer learns a = softplus(alpha_p) and b = 1/2 + softplus(alpha_n).

    Both are 0.8 at first. The exponent stays below -1e-6, as in transformers.  Huang & Schlag 2024, arXiv:2411.13010.
    """

    beta, highest = 0.5, -1e-6
    initializers = {"alpha_p": partial(_softplus_of, 0.8), "alpha_n": partial(_softplus_of, 0.8 - beta)}

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.softplus(self.alpha_p).to(x.dtype), (self.beta + F.softplus(self.alpha_n)).to(x.dtype)
        return torch.where(x > 0, a * x.square(), b * (torch.expm1(x.clamp(max=self.highest)) - x)) + self.beta * x


Gate = Callable[[Tensor, Tensor], Tensor]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "relu2": relu2,
}
LEARNED: dict[Activation, type[nn.Module]] = {"xielu": XIELU}
"""Activations that have weights, of each layer."""
_STEPS: dict[Activation, int] = {"relu": 1, "relu2": 2, "gelu": 2, "gelu_tanh": 2, "silu": 2, "quick_gelu": 3, "xielu": 5}
"""relu needs its result alone."""


def steps_of(name: Activation) -> int:
    """Returns how many tensors autograd keeps from an activation's input to its result, the result included."""
    return _STEPS[name]


def activation_of(name: Activation) -> Callable[[Tensor], Tensor]:
    """Returns the activation of this name: a function, or a module where it has weights."""
    return LEARNED[name]() if name in LEARNED else ACTIVATIONS[name]


class MLP(Divisible):
    """down(act(up(x)))."""

    cut = Divisible.cut_by(("gate", "up"), "down")

    def __init__(self, cfg: MLPConfig, d_model: int) -> None:
        super().__init__()
        hidden = cfg.width(d_model)
        self.up = Linear(d_model, hidden, bias=cfg.bias)
        self.down = Out(hidden, d_model, bias=cfg.bias)
        self.act = activation_of(cfg.activation)
        self.dropout = nn.Dropout(cfg.dropout)
        self.inner_norm = build_within(cfg.inner_norm, hidden)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        out: Tensor = self.down(self.inner_norm(self.dropout(self.act(self.up(x)))))
        return out


class GatedMLP(MLP):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, cfg: MLPConfig, d_model: int) -> None:
        super().__init__(cfg, d_model)
        self.gate = Linear(d_model, cfg.width(d_model), bias=cfg.bias)
        self.combine = cfg.gate(self.act)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        out: Tensor = self.down(self.inner_norm(self.dropout(self.combine(self.gate(x), self.up(x)))))
        return out
