"""The cache of decoding. Each layer declares what it keeps: tensors per token, in a ring for windows, or a state of fixed size.

All of it follows `reorder` (beam search), `rewind` (speculation) and `adopt` (rows that join and leave).
"""

import copy
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.ops.cache.ring import FirstSlots, Slots, get, put
from lm.ops.cache.rounded import FORMS


@dataclass(frozen=True)
class PerToken:
    """Tensors of (heads, dim) for each token. window: how many tokens the layer sees, in a ring of slots that are reused; None: all.

    first: tokens at the start of a row that the layer sees beyond its window.
    """

    tensors: tuple[tuple[int, int], ...]
    window: int | None = None
    first: int = 0


@dataclass(frozen=True)
class Fixed:
    """Tensors of these shapes for each row, however long it is; zeros before its first token."""

    tensors: tuple[tuple[int, ...], ...]


State = PerToken | Fixed


def numbers(layers: Sequence[Sequence[State]]) -> tuple[int, int]:
    """Returns how many numbers a cache keeps of each further token while no window is full, and of a row whatever its length."""
    states = [state for each in layers for state in each]
    of = {kind: sum(prod(shape) for state in states if isinstance(state, kind) for shape in state.tensors) for kind in (PerToken, Fixed)}
    return of[PerToken], of[Fixed]


class Snapshots:
    """A layer's tensors of fixed size for every row: as they were before the last `slack` tokens, and after each of them."""

    def __init__(self, state: Fixed, batch: int, slack: int, device: torch.device, dtype: torch.dtype) -> None:
        empty = [torch.zeros(batch, *shape, device=device, dtype=dtype) for shape in state.tensors]
        self.after = deque([empty], maxlen=slack + 1)

    def reorder(self, rows: Tensor) -> None:
        """Row i continues what row rows[i] held."""
        self.after = deque(([x.index_select(0, rows) for x in tensors] for tensors in self.after), maxlen=self.after.maxlen)

    def can_rewind(self, ns: list[int]) -> bool:
        """Whether there is a state from before each row's last n tokens."""
        return max(ns) < len(self.after)

    def rewind(self, ns: list[int]) -> None:
        """Forget each row's last n tokens."""
        back = max(ns) - torch.tensor(ns, device=self.after[-1][0].device)  # how many tokens fewer than the most
        which = back + torch.arange(len(self.after) - max(ns), device=back.device).unsqueeze(1)  # (states that are left, b)
        rows = torch.arange(len(ns), device=back.device)
        kept = [torch.stack(each)[which, rows].unbind(0) for each in zip(*self.after, strict=True)]
        self.after = deque(map(list, zip(*kept, strict=True)), maxlen=self.after.maxlen)


class Cache:
    """What every layer keeps of up to max_len tokens a row; windowed layers have window + slack slots, and reuse them.

    slack: how many tokens a ring or a state can be rewound by.  horizon: a window for all layers, so that rows can go on beyond the model's
    context; None: none.  form: how the numbers of each token are stored, of `FORMS`.
    """

    before = 0  # layers of the cache before the one that its reader calls 0

    def __init__(
        self,
        layers: Sequence[Sequence[State]],
        batch: int,
        max_len: int,
        like: Tensor,
        slack: int = 8,
        horizon: int | None = None,
        first: int = 0,
        form: str | None = None,
    ) -> None:
        """layers: what each keeps, of each kind one at most.  first: the number of the first.  like: a weight of the model, for device and
        dtype."""
        self.device, self.form = like.device, FORMS[form](like.dtype)
        self.lengths = [0] * batch  # tokens written so far of each row, padding included
        self.slack, self.horizon = slack, horizon
        self.groups: dict[tuple[int, int], Slots] = {}
        self.group_of: dict[int, tuple[int, int]] = {}  # by layer, as are all below
        self.stores: dict[int, list[Tensor]] = {}
        self.states: dict[int, Snapshots] = {}
        for layer, state in ((layer, state) for layer, states in enumerate(layers, first) for state in states):
            if isinstance(state, Fixed):
                self.states[layer] = Snapshots(state, batch, slack, like.device, like.dtype)
                continue
            n = min([max_len, *(window + slack for window in (state.window, horizon) if window is not None)])
            spare = slack if n < max_len else None
            kept = FirstSlots(batch, n, spare, like.device, state.first) if state.first and spare is not None else None
            group = self.group_of[layer] = n, state.first
            slots = self.groups.setdefault(group, kept or Slots(batch, n, spare, like.device))
            empty = (self.form.empty(batch, heads, slots.places, dim, device=like.device) for heads, dim in state.tensors)
            self.stores[layer] = [x for parts in empty for x in parts]
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of an encoder's output, (b, g, m, c)
        self.memory_positions: Tensor | None = None  # (b, m), -1 on padding
        self.recorded: tuple[Hashable, Any] | None = None  # what a step was recorded for, and that step, over these very tensors

    @property
    def length(self) -> int:
        """Tokens written to the longest row, padding included."""
        return max(self.lengths)

    def remember(self, positions: Tensor) -> None:
        """Start on a new source, whose keys and values the layers will put into `memory`.  positions: (b, m)."""
        self.memory, self.memory_positions = {}, positions
        self.recorded = None

    def begin(self, positions: Tensor) -> None:
        """Announce the next chunk, once a forward, before any layer appends.  positions: (b, s), -1 on padding."""
        for slots in self.groups.values():
            slots.begin(positions)
        self.lengths = [n + positions.shape[1] for n in self.lengths]

    def behind(self, n: int) -> Self:
        """Returns this cache, with all that is in it, for blocks that count its layers from the n-th on."""
        same = copy.copy(self)
        same.before = n
        return same

    def group(self, layer: int) -> tuple[int, int]:
        """Returns which of `groups` this layer belongs to."""
        return self.group_of[layer + self.before]

    def append(self, layer: int, *new: Tensor) -> list[Tensor]:
        """Store this layer's tensors of the chunk, each (b, heads, s, dim); returns all that the chunk may see, (b, heads, k, dim)."""
        packed, slots = [self.form.pack(tensor) for tensor in new], self.groups[self.group(layer)]
        stores = iter(self.stores[layer + self.before])
        return [self.form.unpack([slots.append(next(stores), part) for part in parts]) for parts in packed]

    def positions(self, layer: int) -> Tensor:
        """Positions of what `append` returned, (b, k)."""
        return self.groups[self.group(layer)].visible

    def state(self, layer: int) -> list[Tensor]:
        """Returns the tensors of fixed size of a layer, as they are before the chunk, (b, ...) each."""
        return self.states[layer + self.before].after[-1]

    def advance(self, layer: int, *after: Tensor) -> None:
        """Store a layer's tensors of fixed size after each of the chunk's last min(s, slack + 1) tokens: (b, min(s, slack + 1), ...)."""
        self.states[layer + self.before].after.extend(map(list, zip(*(tensor.unbind(1) for tensor in after), strict=True)))

    def reorder(self, rows: Tensor) -> None:
        """Row i continues what row rows[i] held."""
        self.lengths, self.recorded = [self.lengths[row] for row in rows.tolist()], None
        for part in self._parts():
            part.reorder(rows)
        for stores in self.stores.values():  # one tensor after another, so that no more than one is there twice
            for i, store in enumerate(stores):
                stores[i] = store.index_select(0, rows)
        self.memory = {layer: (k.index_select(0, rows), v.index_select(0, rows)) for layer, (k, v) in self.memory.items()}
        if self.memory_positions is not None:
            self.memory_positions = self.memory_positions.index_select(0, rows)

    def adopt(self, held: Sequence[tuple["Cache", Sequence[int]]], length: int) -> None:
        """Fills this empty cache with rows of others, in this order; all rows end together, and shorter ones have padding in front.

        length: tokens to keep of a row, padding included. Adopted tokens can be rewound in tensors per token, not in states of fixed size.
        """
        self.lengths, start = [length] * len(self.lengths), 0
        for slots in self.groups.values():
            slots.written, slots.furthest = [length] * len(slots.written), [length] * len(slots.written)
        parts = [(cache, torch.tensor(rows, device=self.device)) for cache, rows in held]
        for cache, rows in parts:
            at, start = slice(start, start + len(rows)), start + len(rows)
            self._take(cache, rows, at)
        for layer, state in self.states.items():
            each = zip(*([x.index_select(0, rows) for x in cache.state(layer)] for cache, rows in parts), strict=True)
            state.after = deque([list(map(torch.cat, each))], maxlen=state.after.maxlen)
        if held[0][0].memory_positions is not None:
            self._adopt_memory(parts)

    def replace(self, row: int, other: "Cache") -> None:
        """Makes a row the only one of another cache, of no more tokens and without an encoder's output; it ends where the others of this
        cache end, which stay as they are and where they are. States of fixed size cannot be rewound then."""
        for slots in self.groups.values():
            slots.positions[row] = -1
        here = torch.tensor([row], device=self.device)
        self._take(other, torch.zeros_like(here), slice(row, row + 1))
        for layer, state in self.states.items():
            both = zip(self.state(layer), other.state(layer), strict=True)
            state.after = deque([[own.index_copy(0, here, new) for own, new in both]], maxlen=state.after.maxlen)

    def _take(self, other: "Cache", rows: Tensor, at: slice) -> None:
        """Takes over the tokens of `rows` of another cache into rows `at`."""
        for layer, stores in self.stores.items():
            slots, theirs = (each.groups[each.group_of[layer]] for each in (self, other))
            here, there = slots.take(theirs, at, rows)
            for own, store in zip(stores, other.stores[layer], strict=True):
                put(own[at], here, get(store, there, rows))
                if isinstance(slots, FirstSlots):
                    put(own[at], slots.where_first(slots.first)[at], get(store, theirs.where_first(slots.first), rows))

    def _adopt_memory(self, parts: Sequence[tuple["Cache", Tensor]]) -> None:
        """Aligns the encoders' outputs at their ends, as wide as the longest source of the rows that are left."""
        positions = [cache.memory_positions.index_select(0, rows) for cache, rows in parts if cache.memory_positions is not None]
        wide = [int((each >= 0).any(0).sum()) for each in positions]
        pads = [max(wide) - n for n in wide]
        cut = [F.pad(each[:, each.shape[1] - n :], (pad, 0), value=-1) for each, n, pad in zip(positions, wide, pads, strict=True)]
        self.memory_positions = torch.cat(cut)
        for layer in parts[0][0].memory:
            pairs = [
                [F.pad(x.index_select(0, rows)[:, :, x.shape[2] - n :], (0, 0, pad, 0)) for x in cache.memory[layer]]
                for (cache, rows), n, pad in zip(parts, wide, pads, strict=True)
            ]
            self.memory[layer] = torch.cat([k for k, _ in pairs]), torch.cat([v for _, v in pairs])

    def rewind(self, n: int | list[int]) -> None:
        """Forget the last n tokens, or n[i] of row i, after which positions must be given; a ring and a state of fixed size can forget
        as many as their slack. Raises ValueError for more."""
        ns = n if isinstance(n, list) else [n] * len(self.lengths)
        if not all(part.can_rewind(ns) for part in self._parts()):
            raise ValueError(
                f"cannot rewind {max(ns)} tokens: {self.length} are written, and beyond a slack of {self.slack} some are gone."
            )
        for part in self._parts():
            part.rewind(ns)
        self.lengths = [length - n for length, n in zip(self.lengths, ns, strict=True)]

    def _parts(self) -> list[Slots | Snapshots]:
        return [*self.groups.values(), *self.states.values()]
