"""Position: three hooks with identity defaults. A kind overrides what it needs; positions always come as a tensor."""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from lm.config import Config
from lm.nn.rope import RopeConfig, rope_angles, rotate

Angles = tuple[Tensor, Tensor]


class NoPositionConfig(Config):
    """No position information but the causal mask (Kazemnejad et al. 2023, arXiv:2305.19466)."""

    kind: Literal["none"] = "none"


class LearnedConfig(Config):
    """A learned vector per position, added to the embedding (GPT-2)."""

    kind: Literal["learned"] = "learned"


class SinusoidalConfig(Config):
    """Fixed sines and cosines, added to the embedding (Vaswani et al. 2017, arXiv:1706.03762, section 3.5)."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    theta: float = Field(10000.0, gt=0)
    """The longest wavelength is 2 pi theta."""


class Position(nn.Module):
    """No position at all; the base of every kind.  positions: (b, s) int64, -1 on padding."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Change the embedded tokens, (b, s, d)."""
        return x

    def angles(self, positions: Tensor) -> Angles | None:
        """What `rotate` needs, computed once a forward instead of once a layer."""
        return None

    def rotate(self, q: Tensor, k: Tensor, angles: Angles | None, layer: int) -> tuple[Tensor, Tensor]:
        """Change queries and keys, (b, h, s, c) and (b, g, s, c), before keys are cached."""
        return q, k

    def bias(self, q_positions: Tensor, k_positions: Tensor, layer: int) -> Tensor | None:
        """Add to the scores, broadcastable to (b, h, q, k)."""
        return None


class Learned(Position):
    """weight[position], added."""

    def __init__(self, max_seq_len: int, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_seq_len, d))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + nn.functional.embedding(positions.clamp_min(0), self.weight)


class Sinusoidal(Position):
    """sin(p / theta^(2i/d)) at even and cos at odd dimensions, added."""

    def __init__(self, theta: float) -> None:
        super().__init__()
        self.theta = theta

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        d = x.shape[-1]
        rates = torch.exp(torch.arange(0, d, 2, device=x.device, dtype=torch.float32) * (-math.log(self.theta) / d))
        angles = positions.clamp_min(0).unsqueeze(-1).float() * rates  # (b, s) -> (b, s, ceil(d/2))
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :d]  # (b, s, d/2) -> (b, s, d)
        return x + waves.to(x.dtype)


class Rope(Position):
    """Rotary angles on the first `rotary_dim` dimensions of each head."""

    def __init__(self, rotary_dim: int, theta: float) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim
        self.theta = theta

    def angles(self, positions: Tensor) -> Angles | None:
        return rope_angles(positions, self.rotary_dim, self.theta)

    def rotate(self, q: Tensor, k: Tensor, angles: Angles | None, layer: int) -> tuple[Tensor, Tensor]:
        assert angles is not None
        return rotate(q, *angles), rotate(k, *angles)


def build_position(
    cfg: NoPositionConfig | LearnedConfig | SinusoidalConfig | RopeConfig, d_model: int, head_dim: int, max_seq_len: int
) -> Position:
    """The position module of this kind."""
    if isinstance(cfg, LearnedConfig):
        return Learned(max_seq_len, d_model)
    if isinstance(cfg, SinusoidalConfig):
        return Sinusoidal(cfg.theta)
    if isinstance(cfg, RopeConfig):
        return Rope(cfg.rotary_dim(head_dim), cfg.theta)
    return Position()
