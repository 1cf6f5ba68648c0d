"""How text is continued, in numbers; lm/generation/sampling.py does it."""

from pydantic import Field

from lm.schema import Config


class SamplingConfig(Config):
    """How text is continued."""

    max_tokens: int = Field(256, gt=0)
    """Most new tokens."""
    temperature: float = Field(0.8, ge=0)
    """Logits are divided by it; 0 takes the likeliest token each time."""
    top_k: int | None = Field(None, gt=0)
    """Draw from the k likeliest tokens (Fan et al. 2018, arXiv:1805.04833). null: off."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Draw from the fewest tokens that together have this probability (Holtzman et al. 2019, arXiv:1904.09751). null: off."""
    min_p: float | None = Field(None, gt=0, le=1)
    """Draw from tokens with at least this part of the likeliest one's probability (Nguyen et al. 2024, arXiv:2407.01082). null: off."""
    repetition_penalty: float = Field(1.0, ge=1e-6, le=1e9)
    """Above 1 makes every token of the text so far less likely (Keskar et al. 2019, arXiv:1909.05858). 1: off."""
    seed: int = Field(0, ge=0)
    """Another seed gives other samples; the same one the same samples, alone or in a batch."""
    stop: str | list[str] = Field([])
    """Texts that end the output, and are not part of it."""

    @property
    def stops(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop
