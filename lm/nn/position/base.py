"""Position: four hooks with identity defaults. A kind overrides what it needs; positions always come as a tensor."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from lm.errors import ConfigError
from lm.nn.mixers.mask import arange_positions
from lm.nn.position.bias import AlibiConfig, T5RelativeConfig, T5Table, alibi_slopes
from lm.nn.position.config import PositionConfig
from lm.nn.position.rope import RopeConfig, deinterleave, rope_angles, rotate
from lm.nn.position.scaling import frequencies

Angles = tuple[Tensor, Tensor]


class NoPositionConfig(PositionConfig):
    """No position information but the causal mask (Kazemnejad et al. 2023, arXiv:2305.19466)."""

    kind: Literal["none"] = "none"


class LearnedConfig(PositionConfig):
    """A learned vector per position, added to the embedding (GPT-2)."""

    kind: Literal["learned"] = "learned"


class SinusoidalConfig(PositionConfig):
    """Fixed sines and cosines, added to the embedding (Vaswani et al. 2017, arXiv:1706.03762, section 3.5)."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    theta: float = Field(10000.0, gt=0)
    """The longest wavelength is 2 pi theta."""


@dataclass(frozen=True)
class Dims:
    """What a position kind may need to know of its stack. `rotary`: dimensions of a head that may rotate."""

    d_model: int
    n_heads: int
    rotary: int
    max_seq_len: int
    causal: bool


class Position(nn.Module):
    """No position at all; the base of every kind.  positions: (b, s) int64, -1 on padding."""

    def places(self, s: int, device: torch.device, start: int = 0) -> Tensor:
        """start, start + 1, ..., s of them as (1, s): of tokens that come without positions. ConfigError beyond the last there is."""
        return arange_positions(s, device, start)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Change the embedded tokens, (b, s, d)."""
        return x

    def angles(self, positions: Tensor) -> Angles | None:
        """What `rotate` needs, computed once a forward instead of once a layer."""
        return None

    def rotate(self, q: Tensor, k: Tensor, angles: Angles | None, layer: int) -> tuple[Tensor, Tensor]:
        """Change queries and keys, (b, h, s, c) and (b, g, s, c), before keys are cached."""
        return q, k

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """Add to the scores of every layer, broadcastable to (b, h, q, k)."""
        return None


class Learned(Position):
    """weight[position], added."""

    def __init__(self, max_seq_len: int, d: int) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        self.weight = nn.Parameter(torch.empty(max_seq_len, d))

    def places(self, s: int, device: torch.device, start: int = 0) -> Tensor:
        if start + s > self.max_seq_len:
            raise self._beyond(start + s)
        return super().places(s, device, start)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        try:
            return x + nn.functional.embedding(positions.clamp_min(0), self.weight)
        except IndexError as error:  # of given positions, which to look at would wait for a GPU
            raise self._beyond(int(positions.max()) + 1) from error

    def _beyond(self, length: int) -> ConfigError:
        return ConfigError(
            f"a row is {length} tokens long, and position=learned has vectors for model.max_seq_len={self.max_seq_len}. Shorten the row."
        )


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

    def __init__(self, cfg: RopeConfig, dims: Dims) -> None:
        super().__init__()
        r, scaling = cfg.rotary_dim(dims.rotary), cfg.scaling
        self.cfg, self.rotary_dim = cfg, r
        self.amplitude = scaling.amplitude(dims.max_seq_len) if scaling is not None else 1.0
        self.rates = scaling.frequencies(r, cfg.theta, dims.max_seq_len) if scaling is not None else frequencies(r, cfg.theta)
        self._here = self.rates  # no buffers: a cast to bf16 would round them, and the meta device would lose them

    def angles(self, positions: Tensor) -> Angles | None:
        if self._here.device != positions.device:
            self._here = self.rates.to(positions.device)
        return rope_angles(positions, self._here, self.amplitude)

    def rotate(self, q: Tensor, k: Tensor, angles: Angles | None, layer: int) -> tuple[Tensor, Tensor]:
        assert angles is not None
        if self.cfg.none_every is not None and (layer + 1) % self.cfg.none_every == 0:
            return q, k
        if self.cfg.interleaved:
            q, k = deinterleave(q, self.rotary_dim), deinterleave(k, self.rotary_dim)
        return rotate(q, *angles), rotate(k, *angles)


class Alibi(Position):
    """bias = -slope[head] * |query - key|."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(n_heads)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        distance = (q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)).abs().float()  # (b, q, k)
        slopes = torch.tensor(self.slopes, device=distance.device)
        return -slopes[:, None, None] * distance.unsqueeze(1)  # (b, 1, q, k) -> (b, h, q, k)


class T5Relative(Position):
    """bias = table[bucket(key - query), head]."""

    def __init__(self, cfg: T5RelativeConfig, dims: Dims) -> None:
        super().__init__()
        self.table = T5Table(cfg, dims.n_heads, dims.causal)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        bias: Tensor = self.table(k_positions.unsqueeze(-2) - q_positions.unsqueeze(-1))  # (b, q, k) -> (b, h, q, k)
        return bias


def build_position(cfg: PositionConfig, dims: Dims) -> Position:
    """The position module of this kind."""
    match cfg:
        case LearnedConfig():
            return Learned(dims.max_seq_len, dims.d_model)
        case SinusoidalConfig():
            return Sinusoidal(cfg.theta)
        case RopeConfig():
            return Rope(cfg, dims)
        case AlibiConfig():
            return Alibi(dims.n_heads)
        case T5RelativeConfig():
            return T5Relative(cfg, dims)
    return Position()
