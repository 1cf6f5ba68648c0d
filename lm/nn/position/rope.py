"""Rotary position embedding."""

from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from lm.nn.position.base import Angles, Dims, Position, PositionConfig
from lm.nn.position.scaling import ScalingConfig, frequencies
from lm.nn.spacing import evenly, is_there, require_place
from lm.ops.rotation import deinterleave, rope_angles, rotate
from lm.schema import Tree


class RopeConfig(PositionConfig):
    """Rotate queries and keys by an angle proportional to their position (Su et al. 2021, arXiv:2104.09864)."""

    kind: Literal["rope"] = "rope"
    acts = "rotate"
    theta: float = Field(10000.0, gt=1)
    """Base of the geometric series of frequencies."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Part of each head's dimensions that is rotated (GPT-NeoX: 0.25)."""
    interleaved: bool = False
    """Pairs are neighbours (GPT-J, PaLM, DeepSeek) and not half a head apart."""
    none_every: int | None = Field(None, gt=1)
    """Every n-th layer rotates nothing (layer n-1, 2n-1, ..., say; Yang et al. 2025, arXiv:2501.18795). null: all rotate."""
    none_at: int | None = Field(None, ge=0)
    """Which of every n layers that is, counted from 0. null: the last."""
    scaling: ScalingConfig | None = None
    """Other frequencies, as for contexts longer than those of pretraining. null: none."""
    local_theta: float | None = Field(None, gt=1)
    """Base in layers with a window, which no scaling changes (Gemma 3, OLMo 3). null: theta and scaling, as in all others."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        require_place("none_every", self.none_every, "none_at", self.none_at)
        if self.scaling is not None:
            self.scaling.require_fraction(self.fraction)
        return self

    def rotary_dim(self, head_dim: int, whence: str = "", scaling: ScalingConfig | None = None) -> int:
        """Returns how many dimensions of such a head rotate. Raises ValueError where they form no pairs, or this scaling does not fit."""
        r = int(head_dim * self.fraction)  # as transformers counts them
        if r % 2 or r == 0:
            raise ValueError(
                f"position.fraction={self.fraction} of head_dim={head_dim}{whence} rotates {r} dimensions. Choose an even number above 0."
            )
        if scaling is not None:
            scaling.require(r)
        return r

    def build(self, dims: Dims) -> Position:
        return Rope(self, dims)

    def require(self, rotary: int, whence: str = "") -> None:
        self.rotary_dim(rotary, whence, self.scaling)

    def require_windowed(self, rotary: int, whence: str = "") -> None:
        self.rotary_dim(rotary, whence, self.scaling if self.local_theta is None else None)

    def rates(self, rotary: int, max_seq_len: int) -> Tensor:
        """Returns what a position turns each pair of a head of this width by, (r/2,)."""
        r = self.rotary_dim(rotary)
        return frequencies(r, self.theta) if self.scaling is None else self.scaling.frequencies(r, self.theta, max_seq_len)

    def rotates_all(self) -> bool:
        return self.none_every is None

    def implied(self, n_layers: int, windows: bool) -> Tree:
        """Null also for a local_theta that changes no layer."""
        alike = not windows or (self.scaling is None and self.local_theta == self.theta)
        every, at = evenly({layer: is_there(layer, self.none_every, self.none_at) for layer in range(n_layers)}) or (None, None)
        return {
            "none_every": every,
            "none_at": at,
            "local_theta": None if alike else self.local_theta,
        }


class Rope(Position):
    """Rotary angles on the first `rotary_dim` dimensions of each head."""

    def __init__(self, cfg: RopeConfig, dims: Dims) -> None:
        super().__init__()
        scaling, other = cfg.scaling, dims.windowed not in (None, dims.rotary)
        windowed = dims.rotary if dims.windowed is None else dims.windowed
        self.cfg, self.rotary_dim, self.window = cfg, cfg.rotary_dim(dims.rotary), dims.window
        self.amplitude = scaling.amplitude(dims.max_seq_len) if scaling is not None else 1.0
        self.rates, self.local, self.local_amplitude = cfg.rates(dims.rotary, dims.max_seq_len), None, self.amplitude
        if cfg.local_theta is not None:
            self.local, self.local_amplitude = frequencies(cfg.rotary_dim(windowed), cfg.local_theta), 1.0
        elif other:
            self.local = cfg.rates(windowed, dims.max_seq_len)
        self._here = self.rates, self.local  # no buffers: a cast to bf16 would round them, and the meta device would lose them

    def angles(self, positions: Tensor) -> Angles | None:
        """(b, 1, s, r/2) each; with local_theta, or heads of another width there, those of layers with a window too."""
        if self._here[0].device != positions.device:
            self._here = self.rates.to(positions.device), None if self.local is None else self.local.to(positions.device)
        rates, local = self._here
        angles = rope_angles(positions, rates, self.amplitude)
        return angles if local is None else (*angles, *rope_angles(positions, local, self.local_amplitude))

    def of_layer(self, angles: Angles, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the cos and sin of this layer."""
        cos, sin = angles if self.local is None else angles[2:] if self.window(layer) is not None else angles[:2]
        return cos, sin

    def rotates(self, layer: int) -> bool:
        return not is_there(layer, self.cfg.none_every, self.cfg.none_at)

    def rotate(self, x: Tensor, angles: Angles | None, layer: int) -> Tensor:
        assert angles is not None
        if not self.rotates(layer):
            return x
        cos, sin = self.of_layer(angles, layer)
        return rotate(deinterleave(x, 2 * cos.shape[-1]) if self.cfg.interleaved else x, cos, sin)
