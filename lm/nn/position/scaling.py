"""Rotary embeddings for contexts longer than those of pretraining: each kind changes the frequencies, and some the amplitude.

Fields have the names of Hugging Face's `rope_parameters`, except `original_len` (there `original_max_position_embeddings`).
Where a kind depends on the length, it is the configured maximum that counts, so that cached decoding equals a full forward.
"""

import math
from abc import abstractmethod
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from lm.schema import Slot


def frequencies(rotary_dim: int, theta: float) -> Tensor:
    """theta^(-2i/r), float32, (r/2,) on the CPU."""
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim)


class ScalingConfig(Slot):
    """How the rotations of a model for long contexts differ from the plain ones."""

    @abstractmethod
    def frequencies(self, rotary_dim: int, theta: float, max_len: int) -> Tensor:
        """Returns the radians per position of each pair, float32, (r/2,)."""

    def amplitude(self, max_len: int) -> float:
        """Returns the factor on cos and sin."""
        return 1.0

    def require_fraction(self, fraction: float) -> None:
        """Raises ValueError where this kind does not fit positions that rotate this part of each head."""

    def require(self, rotary_dim: int) -> None:
        """Raises ValueError where this kind does not fit heads of which rotary_dim dimensions rotate."""


class LinearScaling(ScalingConfig):
    """Positions divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""

    kind: Literal["linear"] = "linear"
    factor: float = Field(ge=1)
    """New context length / old one."""

    def frequencies(self, rotary_dim: int, theta: float, max_len: int) -> Tensor:
        return frequencies(rotary_dim, theta) / self.factor


class DynamicScaling(ScalingConfig):
    """The base grows with the context, so that high frequencies stay (dynamic NTK; Peng et al. 2023, arXiv:2309.00071, section 3.3)."""

    kind: Literal["dynamic"] = "dynamic"
    factor: float = Field(ge=1)
    """How fast the base grows."""
    original_len: int = Field(gt=0)
    """Context length of pretraining."""

    def frequencies(self, rotary_dim: int, theta: float, max_len: int) -> Tensor:
        return frequencies(rotary_dim, self.theta(rotary_dim, theta, max_len))

    def theta(self, rotary_dim: int, theta: float, max_len: int) -> float:
        """Returns the base in place of the plain one."""
        longer = max(max_len, self.original_len) / self.original_len
        return float(theta * (self.factor * longer - (self.factor - 1)) ** (rotary_dim / (rotary_dim - 2)))

    def require(self, rotary_dim: int) -> None:
        if rotary_dim <= 2:
            raise ValueError(
                f"position.scaling=dynamic stretches all pairs but the first, and {rotary_dim // 2} rotates. Widen heads, or use linear."
            )


class YarnScaling(ScalingConfig):
    """High frequencies kept, low ones divided, a ramp between (Peng et al. 2023, arXiv:2309.00071, sections 3.2 to 3.4)."""

    kind: Literal["yarn"] = "yarn"
    factor: float = Field(ge=1)
    """New context length / old one."""
    original_len: int = Field(gt=0)
    """Context length of pretraining."""
    beta_fast: float = Field(32.0, gt=0)
    """Pairs with more turns than this over the old context are kept."""
    beta_slow: float = Field(1.0, gt=0)
    """Pairs with fewer turns than this are divided by the factor."""
    attention_factor: float | None = Field(None, gt=0)
    """Factor on cos and sin. null: 0.1 ln(factor) + 1, or the ratio of that with mscale and with mscale_all_dim."""
    mscale: float | None = None
    """Factor before ln(factor) (DeepSeek)."""
    mscale_all_dim: float | None = None
    """The same for the part that the score's own scale takes over (DeepSeek)."""
    truncate: bool = True
    """Round the ends of the ramp to whole pairs (false in gpt-oss)."""

    @model_validator(mode="after")
    def _ramp_rises(self) -> Self:
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast} is not over beta_slow={self.beta_slow}. Raise beta_fast, or lower beta_slow.")
        return self

    def frequencies(self, rotary_dim: int, theta: float, max_len: int) -> Tensor:
        low, high = (self._pair(turns, rotary_dim, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low or 0.001)).clamp(0, 1)
        kept = frequencies(rotary_dim, theta)
        return kept * (1 - ramp) + kept / self.factor * ramp

    def amplitude(self, max_len: int) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def score_factor(self) -> float:
        """Returns DeepSeek's factor on the scale of scores, 1/sqrt(head_dim)."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def _pair(self, turns: float, rotary_dim: int, theta: float) -> float:
        """Returns the number of the pair that makes so many turns over the old context."""
        return rotary_dim * math.log(self.original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))


class Llama3Scaling(ScalingConfig):
    """As YaRN, with a ramp in wavelengths and no change of amplitude (Llama 3.1, arXiv:2407.21783)."""

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(ge=1)
    """What long wavelengths are multiplied by."""
    low_freq_factor: float = Field(1.0, gt=0)
    """Wavelengths over original_len / this are long."""
    high_freq_factor: float = Field(4.0, gt=0)
    """Wavelengths under original_len / this stay."""
    original_len: int = Field(gt=0)
    """Context length of pretraining."""

    @model_validator(mode="after")
    def _ramp_rises(self) -> Self:
        low, high = self.low_freq_factor, self.high_freq_factor
        if high < low:
            raise ValueError(f"high_freq_factor={high} is under low_freq_factor={low}. Raise the one, or lower the other.")
        return self

    def frequencies(self, rotary_dim: int, theta: float, max_len: int) -> Tensor:
        kept = frequencies(rotary_dim, theta)
        turns = self.original_len * kept / (2 * math.pi)
        wide = self.high_freq_factor - self.low_freq_factor or 1e-30  # of no width, as in Llama 4, the ramp is a step
        smooth = ((turns - self.low_freq_factor) / wide).clamp(0, 1)
        return kept * smooth + kept / self.factor * (1 - smooth)


class ProportionalScaling(ScalingConfig):
    """The first part of the pairs turns as in heads that rotate whole, and the others do not (Gemma 4, LFM3: in layers without a window);
    position.fraction gives them the rates of a narrower head."""

    kind: Literal["proportional"] = "proportional"
    partial_rotary_factor: float = Field(gt=0, le=1)
    """Part of the pairs that turn, the fast ones (LFM3: 0.5, Gemma 4: 0.25)."""

    def frequencies(self, rotary_dim: int, theta: float, max_len: int) -> Tensor:
        kept = frequencies(rotary_dim, theta)
        kept[self._turning(rotary_dim) :] = 0.0
        return kept

    def require_fraction(self, fraction: float) -> None:
        if fraction != 1.0:
            raise ValueError(
                f"fraction={fraction} leaves out dimensions, and so does scaling.partial_rotary_factor={self.partial_rotary_factor}."
                " Set fraction=1."
            )

    def require(self, rotary_dim: int) -> None:
        if not self._turning(rotary_dim):
            raise ValueError(
                f"position.scaling.partial_rotary_factor={self.partial_rotary_factor} of {rotary_dim // 2} pairs turns none. Raise it."
            )

    def _turning(self, rotary_dim: int) -> int:
        """Returns how many pairs turn."""
        return int(self.partial_rotary_factor * rotary_dim // 2)  # as transformers counts them


Factor = Annotated[float, Field(gt=0)]


class LongRopeScaling(ScalingConfig):
    """A factor found for each pair, one list within the old context and one beyond (Ding et al. 2024, arXiv:2402.13753)."""

    kind: Literal["longrope"] = "longrope"
    short_factor: list[Factor]
    """Divisor of each pair's frequency where max_seq_len is at most original_len."""
    long_factor: list[Factor]
    """The same beyond it."""
    original_len: int = Field(gt=1)
    """Context length of pretraining."""
    factor: float | None = Field(None, gt=0)
    """New context length / old one, for the amplitude. null: max_seq_len / original_len."""
    attention_factor: float | None = Field(None, gt=0)
    """Factor on cos and sin. null: sqrt(1 + ln(factor) / ln(original_len))."""

    def frequencies(self, rotary_dim: int, theta: float, max_len: int) -> Tensor:
        chosen = self.long_factor if max_len > self.original_len else self.short_factor
        return frequencies(rotary_dim, theta) / torch.tensor(chosen, dtype=torch.float32, device="cpu")

    def require(self, rotary_dim: int) -> None:
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if len(factors) != rotary_dim // 2:
                raise ValueError(
                    f"position.scaling.{name} has {len(factors)} factors, and {rotary_dim // 2} pairs rotate. Give one factor a pair."
                )

    def amplitude(self, max_len: int) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        factor = self.factor or max_len / self.original_len
        return math.sqrt(1 + math.log(factor) / math.log(self.original_len)) if factor > 1 else 1.0
