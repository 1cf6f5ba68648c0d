"""Positions that are added to the embedding, and none at all."""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from lm.errors import ConfigError
from lm.nn.position.base import Dims, Position, PositionConfig
from lm.schema import MOST


class NoPositionConfig(PositionConfig):
    """No position information but the causal mask (Kazemnejad et al. 2023, arXiv:2305.19466)."""

    kind: Literal["none"] = "none"

    def build(self, dims: Dims) -> Position:
        return Position()


class LearnedConfig(PositionConfig):
    """A learned vector per position, added to the embedding (GPT-2)."""

    kind: Literal["learned"] = "learned"
    by_place = True

    def build(self, dims: Dims) -> Position:
        return Learned(dims.max_seq_len, dims.d_model)


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

    def forward(self, positions: Tensor) -> Tensor:
        """(b or 1, s) -> (b or 1, s, d). A module of its own to ZeRO-3, which gathers weights where a module is called."""
        return nn.functional.embedding(positions.clamp_min(0), self.weight)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        try:
            vectors: Tensor = self(positions)
            return x + vectors
        except IndexError as error:  # positions that a batch gives: to check them before would wait for a GPU
            raise self._beyond(int(positions.max()) + 1) from error

    def _beyond(self, length: int) -> ConfigError:
        return ConfigError(
            f"a row is {length} tokens long, and position=learned has vectors for model.max_seq_len={self.max_seq_len}. Shorten the row."
        )


class SinusoidalConfig(PositionConfig):
    """Fixed sines and cosines, added to the embedding (Vaswani et al. 2017, arXiv:1706.03762, section 3.5). Their amplitude is 1, so that
    token embeddings should be as large: embed.scale = 1 / init.std, or sqrt(d_model) where init.std is 1 / sqrt(d_model)."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    theta: float = Field(10000.0, gt=0)
    """The longest wavelength is 2 pi theta."""
    halves: bool = False
    """All sines come first, and all cosines behind them (Marian); false alternates them."""
    exact: bool = False
    """Rates fall to 1/theta itself, theta^(-i/(d/2-1)) (M2M-100, as tensor2tensor); false: theta^(-2i/d), nearly as far."""
    first: int = Field(0, ge=0, le=MOST)
    """Position of the first token (M2M-100: 2)."""

    def build(self, dims: Dims) -> Position:
        return Sinusoidal(self)


class Sinusoidal(Position):
    """sin(p / theta^(2i/d)) at even and cos at odd dimensions, or in the first and the second half, added."""

    def __init__(self, cfg: SinusoidalConfig) -> None:
        super().__init__()
        self.cfg = cfg

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.waves(positions, x.shape[-1]).to(x.dtype)

    def waves(self, positions: Tensor, d: int) -> Tensor:
        """(b, s) -> (b, s, d), float32."""
        last = max(d - 2, 1) if self.cfg.exact else d
        rates = torch.exp(torch.arange(0, d, 2, device=positions.device, dtype=torch.float32) * (-math.log(self.cfg.theta) / last))
        angles = (positions.clamp_min(0) + self.cfg.first).unsqueeze(-1).float() * rates  # (b, s) -> (b, s, ceil(d/2))
        if self.cfg.halves:
            return torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :d]
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :d]  # (b, s, d/2) -> (b, s, d)
