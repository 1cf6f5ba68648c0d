"""The options of activation checkpointing."""

from typing import Self

from pydantic import Field, model_validator

from lm.ops.recompute import Recompute, Recomputed
from lm.schema import Config


class RecomputeConfig(Config):
    """What blocks compute again for the backward."""

    recompute: Recomputed = "none"
    """What blocks compute again for the backward instead of keeping it (activation checkpointing). block: all but their input; selective:
    all but their input, matrix products and fused attention."""
    recompute_every: int = Field(1, gt=0)
    """Every n-th block does so."""

    @model_validator(mode="after")
    def _every_of_some(self) -> Self:
        if self.recompute == "none" and self.recompute_every > 1:
            raise ValueError(f"recompute_every={self.recompute_every} has no effect with recompute=none. Set recompute=block or selective.")
        return self

    def recomputes(self) -> "Recompute":
        """Returns these options as the `Recompute` that a model takes."""
        return Recompute(self.recompute, self.recompute_every)
