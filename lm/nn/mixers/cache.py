"""The key/value cache: preallocated, a ring for windows, with `reorder` (beam search) and `rewind` (speculation)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps per token: tensors of (heads, dim), and how far back it looks (None: everything)."""

    tensors: tuple[tuple[int, int], ...]
    window: int | None = None


class Slots:
    """Which position each slot holds, shared by all layers with as many slots. -1 marks an empty or hidden slot."""

    def __init__(self, batch: int, n: int, slack: int | None, device: torch.device) -> None:
        """slack: how many slots of a ring are beyond its window; None where no slot is ever used again."""
        self.positions = torch.full((batch, n), -1, dtype=torch.int64, device=device)
        self.n, self.slack, self.written, self.furthest = n, slack, 0, 0
        self.in_place, self.old, self.visible = True, 0, self.positions[:, :0]
        self.index: slice | Tensor = slice(0, 0)

    def begin(self, positions: Tensor) -> None:
        """Make room for a chunk, (b, s). A chunk that would overwrite what its first token still sees is attended beside the ring."""
        s, start = positions.shape[1], self.written
        if self.slack is None and start + s > self.n:
            raise ValueError(f"the cache holds {self.n} tokens, and {start} + {s} are too many. Give new_cache a larger max_len.")
        self.in_place = start + s <= self.n or (self.slack is not None and s <= self.slack)
        self.old = min(start, self.n)
        beside = torch.cat([self.positions[:, : self.old], positions], dim=1) if not self.in_place else None
        kept = min(s, self.n)
        self.index = self._range(start + s - kept, kept)
        self.positions[:, self.index] = positions[:, s - kept :]
        self.written = start + s
        self.furthest = max(self.furthest, self.written)
        self.visible = self.positions[:, : min(self.written, self.n)] if beside is None else beside

    def append(self, store: Tensor, new: Tensor) -> Tensor:
        """Write the chunk of one layer, (b, heads, s, dim), and return what it attends to, (b, heads, k, dim)."""
        if self.in_place:
            store[:, :, self.index] = new
            return store[:, :, : self.visible.shape[1]]
        seen = torch.cat([store[:, :, : self.old], new], dim=2)
        store[:, :, self.index] = new[:, :, -min(new.shape[2], self.n) :]
        return seen

    def rewind(self, n: int) -> None:
        """A ring that has come round holds no more than its window before `furthest` - slack."""
        lost = self.slack is not None and self.furthest > self.n and self.written - n < self.furthest - self.slack
        if n > self.written or lost:
            raise ValueError(f"cannot rewind {n} tokens: {self.written} written, {self.furthest} at most before, slack {self.slack}.")
        self.written -= n
        self.positions[:, self._range(self.written, n)] = -1

    def _range(self, start: int, length: int) -> slice | Tensor:
        first = start % self.n
        if first + length <= self.n:
            return slice(first, first + length)
        return (torch.arange(start, start + length, device=self.positions.device)) % self.n


class Cache:
    """Keys and values of every layer for up to max_len tokens; windowed layers keep window + slack slots and reuse them."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        batch: int,
        max_len: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        slack: int = 8,
    ) -> None:
        device = torch.device(device)
        self.groups: dict[int, Slots] = {}
        self.slots: list[Slots] = []
        self.stores: list[list[Tensor]] = []
        for layer in layers:
            n = max_len if layer.window is None else min(max_len, layer.window + slack)
            self.slots.append(self.groups.setdefault(n, Slots(batch, n, slack if n < max_len else None, device)))
            self.stores.append([torch.zeros(batch, heads, n, dim, device=device, dtype=dtype) for heads, dim in layer.tensors])
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of an encoder's output, by layer, (b, g, m, c)
        self.memory_positions: Tensor | None = None  # (b, m), -1 on padding

    @property
    def length(self) -> int:
        """Tokens written so far, padding included."""
        return next(iter(self.groups.values())).written

    def remember(self, positions: Tensor) -> None:
        """Start on a new memory, whose keys and values the layers will put into `memory`.  positions: (b, m)."""
        self.memory, self.memory_positions = {}, positions

    def begin(self, positions: Tensor) -> None:
        """Announce the next chunk, once a forward, before any layer appends.  positions: (b, s), -1 on padding."""
        for slots in self.groups.values():
            slots.begin(positions)

    def append(self, layer: int, *new: Tensor) -> list[Tensor]:
        """Store this layer's tensors of the chunk, each (b, heads, s, dim); returns all that the chunk may see, (b, heads, k, dim)."""
        return [self.slots[layer].append(store, tensor) for store, tensor in zip(self.stores[layer], new, strict=True)]

    def positions(self, layer: int) -> Tensor:
        """Positions of what `append` returned, (b, k)."""
        return self.slots[layer].visible

    def reorder(self, rows: Tensor) -> None:
        """Row i continues what row rows[i] held."""
        for slots in self.groups.values():
            slots.positions = slots.positions.index_select(0, rows)
        self.stores = [[store.index_select(0, rows) for store in layer] for layer in self.stores]
        self.memory = {layer: (k.index_select(0, rows), v.index_select(0, rows)) for layer, (k, v) in self.memory.items()}
        if self.memory_positions is not None:
            self.memory_positions = self.memory_positions.index_select(0, rows)

    def rewind(self, n: int) -> None:
        """Forget the last n tokens; a ring can forget as many as its slack."""
        for slots in self.groups.values():
            slots.rewind(n)
