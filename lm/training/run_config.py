"""Where a run is kept, what of it, and how it goes on."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from lm.schema import Config
from lm.storage.run_folder import RunFolder

Seed = Annotated[int, Field(ge=0)]


class Seeds(Config):
    """What chance decides in a run, each by a seed of its own; seed=N is all of them."""

    init: Seed
    """Initial weights, and samples."""
    data: Seed
    """Order of the rows, and what is masked, cut or drawn in them."""
    dropout: Seed
    """Dropout, scheduled sampling, and answers that are learned from."""


class RunConfig(Config):
    """Which folder a run lives in."""

    name: str
    """Folder name below `dir`: up to 120 letters (a to z, A to Z), digits and ._,=+@- with a letter or digit first."""
    dir: str = "runs"
    """Folder of all runs."""

    @field_validator("name")
    @classmethod
    def _stays_inside_dir(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._,=+@-]{0,119}", name):
            rule = "up to 120 letters (a to z, A to Z), digits and ._,=+@- with a letter or digit first"
            raise ValueError(f"'{name[:40]}' cannot name a run folder. Use {rule}.")
        return name

    @property
    def folder(self) -> Path:
        """Returns the run's folder."""
        return RunFolder.of(self.tree()).path


class CheckpointConfig(Config):
    """When to save and how many to keep."""

    every: int = Field(100, gt=0)
    """Steps between checkpoints, or a text such as 1epochs; the last step always saves."""
    keep_last: int = Field(2, gt=0)
    """Checkpoints kept."""
    keep_steps: list[Annotated[int, Field(ge=0)]] = []
    """Steps that are saved and kept beside those, such as where a run of another length is to branch off; 0: before the first,
    50%: in the middle."""
    best: bool = False
    """Hand on the model of the best validation (val_loss, val_pair_loss, val_answer_loss or val_reward), whose checkpoint is kept too, not
    the last one."""
    background: bool = False
    """Training goes on while a checkpoint is written; takes a copy of weights and optimizer in the host's memory."""

    @property
    def most(self) -> int:
        """Returns the most checkpoints on disk at once; the newest is complete before the oldest is removed."""
        return self.keep_last + 1 + len(self.keep_steps) + self.best


class ResumeConfig(Config):
    """What to do with a run folder that exists."""

    mode: Literal["auto", "must"] = "auto"
    """auto: resume where there is a checkpoint, else start; must: refuse to start from nothing."""
    fresh_optimizer: bool = False
    """Resume weights and step but start the optimizer anew."""
