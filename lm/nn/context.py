"""What a block knows of the current forward beside its input: positions, masks, cache."""

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from lm.nn.position.base import Angles, Position
from lm.ops.attention.mask import Mask, arange_positions
from lm.ops.cache.cache import Cache


@dataclass
class Reported:
    """What layers report beside their output: losses of rows by name, and the loads of experts, by (stack, layer)."""

    losses: dict[str, dict[tuple[str, int], Tensor]] = field(default_factory=dict)  # (b,), to be weighted by each row's label tokens
    loads: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # (e,), tokens per expert, padding left out


class Context:
    """Passed through every block of one forward; blocks read it, report losses and loads to it and tell each other by `shared`.

    No dataclass: FSDP2 copies the dataclasses among a block's arguments, to put its hooks on the tensors within, and what a block adds to
    a copy is lost.
    """

    def __init__(
        self,
        position: Position,
        mask: Mask,
        angles: Angles | None = None,
        cache: Cache | None = None,
        memory_mask: Mask | None = None,
        tokens: Tensor | None = None,
        stack: str = "",
        reported: Reported | None = None,
    ) -> None:
        """tokens: (b, s), for mixers that look them up.  reported: that of another stack, which this one adds to."""
        self.position, self.mask, self.angles, self.cache = position, mask, angles, cache
        self.memory: Tensor | None = None  # (b, m, d), the encoder's output for cross-attention; None where the cache holds its keys
        self.memory_mask, self.tokens, self.stack = memory_mask, tokens, stack
        self.own: Tensor | None = None  # (b, s, c), what the layer at work alone reads of each token
        self.shared: dict[Hashable, tuple[Tensor, ...]] = {}  # what layers tell later ones of the same pass
        self.reported = Reported() if reported is None else reported
        self._losses: dict[str, Tensor] = {}  # of the block at work
        self._loads: Tensor | None = None
        self.mtp: list[Tensor] = []  # hidden states that predict the 2nd, 3rd, ... next token, (b, s, d) each
        self.mtp_weight = 0.0
        self._cached_masks: dict[Hashable, Mask] = {}  # by group of the cache

    @classmethod
    def alone(cls, x: Tensor, position: Position | None = None, causal: bool = True) -> Self:
        """Returns the context of whole rows, one document each, for a block or a mixer that is used by itself.  x: (b, s, d)."""
        at, position = arange_positions(x.shape[1], x.device), position or Position()
        return cls(position, Mask(at, at, causal=causal, square=True), position.angles(at))

    def again(self, layers: int) -> Self:
        """Returns the context of the next pass through the same blocks, whose cache is behind that of so many layers."""
        same = copy.copy(self)
        same.shared = {}
        if self.cache is not None:
            same.cache = self.cache.behind(layers)
        return same

    def for_layer(self, own: Tensor | None) -> Self:
        """Returns the context of one layer, which alone reads this, (b, s, c); a layer that is run again finds the same in it."""
        if own is None:
            return self
        same = copy.copy(self)
        same.own = own
        return same

    def report_loss(self, name: str, rows: Tensor) -> None:
        """Tells what the block at work adds to the loss of each row, (b,), and by what name metrics show it (`router_loss`).

        Without the layer's number, so that one compiled block serves for all that are alike; and a block that is run again (activation
        checkpointing) counts once, since nobody asks then.
        """
        self._losses = {**self._losses, name: rows}

    def report_loads(self, loads: Tensor) -> None:
        """Tells of the experts of the block at work how many tokens each has, (e,)."""
        self._loads = loads

    def collect(self, layer: int) -> None:
        """Files what the block has reported under this layer, in addition to what it has reported before."""
        for name, rows in self._losses.items():
            self._add(self.reported.losses.setdefault(name, {}), layer, rows)
        if self._loads is not None:
            self._add(self.reported.loads, layer, self._loads)
        self._losses, self._loads = {}, None

    def _add(self, held: dict[tuple[str, int], Tensor], layer: int, new: Tensor) -> None:
        at = self.stack, layer
        held[at] = held[at] + new if at in held else new

    @property
    def positions(self) -> Tensor:
        """Positions of this rank's tokens, (b or 1, s)."""
        return self.mask.sharding.shard(self.mask.q_positions)

    def keys(self, layer: int) -> Mask:
        """Returns the mask over the keys that this layer sees: the input's own, or those in its cache."""
        if self.cache is None:
            return self.mask
        k_positions, group = self.cache.positions(layer), self.cache.group(layer)
        if group not in self._cached_masks:
            first = k_positions.shape[1] == self.mask.q_positions.shape[1]  # nothing was cached before
            prefix = self.mask.k_prefix if first else None
            horizon, padded = self.cache.horizon, self.mask.padded
            made = Mask(self.mask.q_positions, k_positions, causal=self.mask.causal, k_prefix=prefix, horizon=horizon, padded=padded)
            self._cached_masks[group] = made
        return self._cached_masks[group]

    def memory_keys(self, layer: int, project: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the encoder's output in this layer, projected once and then cached."""
        if self.cache is None:
            assert self.memory is not None
            return project(self.memory)
        if layer not in self.cache.memory:
            assert self.memory is not None
            self.cache.memory[layer] = project(self.memory)
        return self.cache.memory[layer]
