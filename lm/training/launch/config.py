"""Which processes train, as the config says it."""

import re
from typing import Self

from pydantic import Field, model_validator

from lm.schema import Config


class LaunchConfig(Config):
    """Which processes train."""

    devices: int = Field(1, gt=0, le=1024)
    """Processes on each machine, one per GPU."""
    nodes: int = Field(1, gt=0, le=65536)
    """Machines; start the same command on each of them."""
    context: int = Field(1, gt=0, le=1024)
    """Ranks that hold a slice each of the same rows, for rows too long for one device; attention exchanges them. 1: whole rows."""
    tensor: int = Field(1, gt=0, le=1024)
    """Ranks that hold a slice each of the matrices, of mixtures some experts, and of the same rows between them, with strategy=fsdp.
    1: whole matrices."""
    rendezvous: str | None = None
    """host:port of the first machine, which all machines reach; needed where nodes > 1."""
    max_restarts: int = Field(0, ge=0, le=1000)
    """Starts anew from the last valid checkpoint after a process died or broke, or memory or disk ran out; no other error is tried
    again. On one machine."""
    timeout_s: int = Field(1800, gt=0, le=30 * 86400)
    """Seconds that ranks, and machines, wait for each other before they give up."""

    @property
    def world(self) -> int:
        """Number of processes on all nodes."""
        return self.devices * self.nodes

    @property
    def data_parallel(self) -> int:
        """Returns the number of groups of ranks that read rows of their own."""
        return self.world // self.ranks_per_row

    @property
    def ranks_per_row(self) -> int:
        """Returns how many ranks share the same rows, by context or tensor parallelism."""
        return max(self.context, self.tensor)

    @property
    def row_sharing(self) -> str:
        """Returns the option that sets `ranks_per_row`, as key=value."""
        return f"tensor={self.tensor}" if self.tensor > 1 else f"context={self.context}"

    @model_validator(mode="after")
    def _groups_are_whole(self) -> Self:
        if self.context > 1 and self.tensor > 1:
            raise ValueError(f"context={self.context} and tensor={self.tensor} both cut the rows. Set one of them to 1.")
        if self.world % self.ranks_per_row:
            raise ValueError(
                f"{self.row_sharing} ranks hold a row, and devices * nodes={self.world} is not a multiple. Choose a divisor of it."
            )
        return self

    @model_validator(mode="after")
    def _nodes_can_meet(self) -> Self:
        if self.nodes > 1 and not re.fullmatch(r"[^\s:]+:\d+", self.rendezvous or ""):
            raise ValueError(f"nodes={self.nodes} need a place to meet, and rendezvous is {self.rendezvous}. Give one as host:29400.")
        if self.nodes > 1 and self.max_restarts:
            raise ValueError(
                f"max_restarts={self.max_restarts} is for one machine, and nodes={self.nodes}. Leave it out, and start the same command"
                " on each machine again: the run goes on."
            )
        return self
