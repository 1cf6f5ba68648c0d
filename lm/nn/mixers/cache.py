"""What decoding keeps of the tokens so far, as each layer declares it: per token, in a ring for windows, or as a state of fixed size.

All of it follows `reorder` (beam search), `rewind` (speculation) and `adopt` (rows that join and leave).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.nn.mixers.rounded import FORMS


@dataclass(frozen=True)
class PerToken:
    """Tensors of (heads, dim) of each token, and how far back the layer looks (None: everything; else a ring of places used again)."""

    tensors: tuple[tuple[int, int], ...]
    window: int | None = None


@dataclass(frozen=True)
class Fixed:
    """Tensors of these shapes, however long the row is; zeros before its first token."""

    tensors: tuple[tuple[int, ...], ...]


State = PerToken | Fixed


def numbers(states: Sequence[State]) -> tuple[int, int]:
    """Returns how many numbers are kept of one more token while no window is full, and of a row whatever its length."""
    of = {kind: sum(prod(shape) for state in states if isinstance(state, kind) for shape in state.tensors) for kind in (PerToken, Fixed)}
    return of[PerToken], of[Fixed]


class Slots:
    """Which position each slot holds, shared by all layers with as many slots. -1 marks an empty or hidden slot."""

    def __init__(self, batch: int, n: int, slack: int | None, device: torch.device) -> None:
        """slack: how many slots of a ring are beyond its window; None where no slot is ever used again."""
        self.positions = torch.full((batch, n), -1, dtype=torch.int64, device=device)
        self.n, self.slack = n, slack
        self.written, self.furthest = [0] * batch, [0] * batch  # tokens of each row, padding included: now, and before it was rewound
        self.in_place, self.old, self.visible = True, 0, self.positions[:, :0]
        self.index: slice | Tensor = slice(0, 0)

    def begin(self, positions: Tensor) -> None:
        """Make room for a chunk, (b, s). A chunk that would overwrite what its first token still sees is attended beside the ring."""
        s, start = positions.shape[1], max(self.written)
        if self.slack is None and start + s > self.n:
            raise ValueError(f"the cache holds {self.n} tokens, and {start} + {s} are too many. Give new_cache a larger max_len.")
        self.in_place = start + s <= self.n or (self.slack is not None and s <= self.slack)
        self.old = min(start, self.n)
        beside = torch.cat([self.positions[:, : self.old], positions], dim=1) if not self.in_place else None
        kept = min(s, self.n)
        self.written = [n + s for n in self.written]
        self.index = self._last(kept)
        _put(self.positions, self.index, positions[:, s - kept :])
        self.furthest = list(map(max, self.furthest, self.written))
        self.visible = self.positions[:, : min(start + s, self.n)] if beside is None else beside

    def append(self, store: Tensor, new: Tensor) -> Tensor:
        """Write the chunk of one layer, (b, heads, s, dim), and return what it attends to, (b, heads, k, dim)."""
        if self.in_place:
            _put(store, self.index, new)
            return store[:, :, : self.visible.shape[1]]
        seen = torch.cat([store[:, :, : self.old], new], dim=2)
        _put(store, self.index, new[:, :, -min(new.shape[2], self.n) :])
        return seen

    def reorder(self, rows: Tensor) -> None:
        """Row i continues what row rows[i] held."""
        self.positions = self.positions.index_select(0, rows)
        self.written, self.furthest = ([held[row] for row in rows.tolist()] for held in (self.written, self.furthest))

    def can_rewind(self, ns: list[int]) -> bool:
        """Whether all is there that came before each row's last n tokens: a ring that came round holds its window before `furthest` -
        slack."""
        kept = [written - n for written, n in zip(self.written, ns, strict=True)]
        lost = [self.slack is not None and far > self.n and left < far - self.slack for left, far in zip(kept, self.furthest, strict=True)]
        return min(kept) >= 0 and not any(lost)

    def rewind(self, ns: list[int]) -> None:
        """Forget each row's last n tokens."""
        last = self._places(max(ns))
        forgotten = torch.tensor([[i >= max(ns) - n for i in range(max(ns))] for n in ns], dtype=torch.bool, device=last.device)
        self.positions.scatter_(1, last, self.positions.gather(1, last).masked_fill(forgotten, -1))
        self.written = [written - n for written, n in zip(self.written, ns, strict=True)]

    def take(self, other: "Slots", at: slice, rows: Tensor) -> tuple[slice | Tensor, slice | Tensor]:
        """Holds the last tokens of these rows of another in its own rows `at`; returns where they are, and where they were."""
        k = min(self.written[0], self.n, max(other.written))
        here, there = self._last(k), other._last(k)
        here = here if isinstance(here, slice) else here[at]
        _put(self.positions[at], here, _get(other.positions, there, rows))  # -1 in front of a row that is shorter than others there
        return here, there

    def _last(self, length: int) -> slice | Tensor:
        """Where each row's last tokens are: a slice where all rows are as long and the ring does not begin anew in it, or (b, length)."""
        first = (self.written[0] - length) % self.n
        even = min(self.written) == max(self.written)
        return slice(first, first + length) if even and first + length <= self.n else self._places(length)

    def _places(self, length: int) -> Tensor:
        ends = torch.tensor(self.written, device=self.positions.device).unsqueeze(1)
        return (ends + torch.arange(-length, 0, device=ends.device)) % self.n  # (b, length)


def _get(of: Tensor, where: slice | Tensor, rows: Tensor) -> Tensor:
    """What `_put` has written to these rows."""
    if isinstance(where, slice):
        return of[(slice(None),) * (1 + of.ndim // 4) + (where,)].index_select(0, rows)
    where, of = where[rows], of.index_select(0, rows)
    return of.gather(of.ndim // 2, where if of.ndim == 2 else where[:, None, :, None].expand(-1, of.shape[1], -1, of.shape[3]))


def _put(into: Tensor, where: slice | Tensor, new: Tensor) -> None:
    """into: (b, k) or (b, heads, k, dim); where: a slice of k, or (b, s)."""
    if isinstance(where, slice):
        into[(slice(None),) * (1 + into.ndim // 4) + (where,)] = new
    else:
        into.scatter_(into.ndim // 2, (where if into.ndim == 2 else where[:, None, :, None]).expand_as(new), new.to(into.dtype))


class Snapshots:
    """Tensors of fixed size of every row, after each of the last `slack` tokens and before them."""

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
        back = max(ns) - torch.tensor(ns, device=self.after[-1][0].device)  # how much less than the most
        which, rows = (
            back + torch.arange(len(self.after) - max(ns), device=back.device).unsqueeze(1),
            torch.arange(len(ns), device=back.device),
        )
        kept = [torch.stack(each)[which, rows].unbind(0) for each in zip(*self.after, strict=True)]
        self.after = deque(map(list, zip(*kept, strict=True)), maxlen=self.after.maxlen)


class Cache:
    """What every layer keeps of up to max_len tokens; windowed layers have window + slack places and use them again.

    horizon: a window for all layers, of a row that goes on beyond the context; None: none.  form: of the numbers of each token.
    """

    def __init__(
        self,
        layers: Sequence[State],
        batch: int,
        max_len: int,
        like: Tensor,
        slack: int = 8,
        horizon: int | None = None,
        first: int = 0,
        form: str | None = None,
    ) -> None:
        """like: a weight of the model, whose device and dtype it has.  first: the layer that the first state is of."""
        self.device, self.form = like.device, FORMS[form](like.dtype)
        self.lengths = [0] * batch  # tokens written so far of each row, padding included
        self.slack, self.horizon = slack, horizon
        self.groups: dict[int, Slots] = {}
        self.slots: dict[int, Slots] = {}  # by layer, as are all below
        self.stores: dict[int, list[Tensor]] = {}
        self.states: dict[int, Snapshots] = {}
        for layer, state in enumerate(layers, first):
            if isinstance(state, Fixed):
                self.states[layer] = Snapshots(state, batch, slack, like.device, like.dtype)
                continue
            n = min([max_len, *(window + slack for window in (state.window, horizon) if window is not None)])
            self.slots[layer] = self.groups.setdefault(n, Slots(batch, n, slack if n < max_len else None, like.device))
            self.stores[layer] = [x for heads, dim in state.tensors for x in self.form.empty(batch, heads, n, dim, device=like.device)]
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of an encoder's output, (b, g, m, c)
        self.memory_positions: Tensor | None = None  # (b, m), -1 on padding

    @property
    def length(self) -> int:
        """That of the longest row."""
        return max(self.lengths)

    def remember(self, positions: Tensor) -> None:
        """Start on a new memory, whose keys and values the layers will put into `memory`.  positions: (b, m)."""
        self.memory, self.memory_positions = {}, positions

    def begin(self, positions: Tensor) -> None:
        """Announce the next chunk, once a forward, before any layer appends.  positions: (b, s), -1 on padding."""
        for slots in self.groups.values():
            slots.begin(positions)
        self.lengths = [n + positions.shape[1] for n in self.lengths]

    def append(self, layer: int, *new: Tensor) -> list[Tensor]:
        """Store this layer's tensors of the chunk, each (b, heads, s, dim); returns all that the chunk may see, (b, heads, k, dim)."""
        packed = [self.form.pack(tensor) for tensor in new]
        stores = iter(self.stores[layer])
        return [self.form.unpack([self.slots[layer].append(next(stores), part) for part in parts]) for parts in packed]

    def positions(self, layer: int) -> Tensor:
        """Positions of what `append` returned, (b, k)."""
        return self.slots[layer].visible

    def state(self, layer: int) -> list[Tensor]:
        """The tensors of a layer of fixed state before the chunk, (b, ...) each."""
        return self.states[layer].after[-1]

    def advance(self, layer: int, *after: Tensor) -> None:
        """Store them as they are after each of the chunk's last min(s, slack + 1) tokens, (b, min(s, slack + 1), ...) each."""
        self.states[layer].after.extend(map(list, zip(*(tensor.unbind(1) for tensor in after), strict=True)))

    def reorder(self, rows: Tensor) -> None:
        """Row i continues what row rows[i] held."""
        self.lengths = [self.lengths[row] for row in rows.tolist()]
        for part in self._parts():
            part.reorder(rows)
        self.stores = {layer: [store.index_select(0, rows) for store in stores] for layer, stores in self.stores.items()}
        self.memory = {layer: (k.index_select(0, rows), v.index_select(0, rows)) for layer, (k, v) in self.memory.items()}
        if self.memory_positions is not None:
            self.memory_positions = self.memory_positions.index_select(0, rows)

    def adopt(self, held: Sequence[tuple["Cache", Sequence[int]]], length: int) -> None:
        """An empty cache goes on from rows of others, in this order; all end together, and what is short has padding in front of it.

        length: tokens to keep of a row, padding included. What came before can be rewound in tensors of tokens, not in states.
        """
        self.lengths, start = [length] * len(self.lengths), 0
        for slots in self.groups.values():
            slots.written, slots.furthest = [length] * len(slots.written), [length] * len(slots.written)
        parts = [(cache, torch.tensor(rows, device=self.device)) for cache, rows in held]
        for cache, rows in parts:
            at, start = slice(start, start + len(rows)), start + len(rows)
            for layer, stores in self.stores.items():
                here, there = self.slots[layer].take(cache.slots[layer], at, rows)
                for own, store in zip(stores, cache.stores[layer], strict=True):
                    _put(own[at], here, _get(store, there, rows))
        for layer, state in self.states.items():
            each = zip(*([x.index_select(0, rows) for x in cache.state(layer)] for cache, rows in parts), strict=True)
            state.after = deque([list(map(torch.cat, each))], maxlen=state.after.maxlen)
        if held[0][0].memory_positions is not None:
            self._adopt_memory(parts)

    def _adopt_memory(self, parts: Sequence[tuple["Cache", Tensor]]) -> None:
        """Memories become as wide as the widest that is left."""
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
        """Forget the last n tokens, or so many of each row, after which positions must be given; a ring and a state of fixed size can
        forget as many as their slack. Raises ValueError for more."""
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
