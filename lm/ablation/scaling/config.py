"""The config of a ladder of sizes."""

from typing import Literal

from pydantic import Field

from lm.ablation.config import RunsConfig

LADDER = "ladder.json"
"""Name of the file in a ladder's folder that says what was asked."""
LEAST = 3
"""Fewest sizes, and fewest lengths: fewer cannot show an exponent and a floor."""
Count = Literal["non_embedding", "parameters"]


class LadderConfig(RunsConfig):
    """What a ladder was told."""

    sizes: dict[str, list[str]]
    """Overrides by the name of each size."""
    tokens: list[float] = Field([0.5, 1.0, 2.0], min_length=1)
    """Lengths of the trainings, as multiples of the config's own; a schedule is relative to each."""
    metric: str = "val_loss"
    """A figure of the runs' summary that the law is of."""
