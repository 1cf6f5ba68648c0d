"""Which slot of a cache holds which token: slots that windows reuse as a ring, and slots reserved for a row's first tokens."""

import torch
from torch import Tensor


class Slots:
    """The position that each slot holds, shared by all layers with the same number of slots. -1 marks an empty or hidden slot."""

    def __init__(self, batch: int, n: int, slack: int | None, device: torch.device) -> None:
        """slack: how many slots a ring has beyond its window; None where no slot is ever reused."""
        self.positions = torch.full((batch, n), -1, dtype=torch.int64, device=device)
        self.n = self.places = n
        self.slack = slack
        self.written, self.furthest = [0] * batch, [0] * batch  # tokens written to each row, padding included: now, and before any rewind
        self.in_place, self.old, self.visible = True, 0, self.positions[:, :0]
        self.index: slice | Tensor = slice(0, 0)

    def begin(self, positions: Tensor) -> None:
        """Make room for a chunk, (b, s). A chunk that would overwrite what its first token still sees attends to old and new tokens
        joined outside the ring."""
        s, start = positions.shape[1], max(self.written)
        if self.slack is None and start + s > self.n:
            raise ValueError(f"the cache holds {self.n} tokens, and {start} + {s} are too many. Give new_cache a larger max_len.")
        self.in_place = start + s <= self.n or (self.slack is not None and s <= self.slack)
        self.old = min(start, self.n)
        beside = torch.cat([self.positions[:, : self.old], positions], dim=1) if not self.in_place else None
        kept = min(s, self.n)
        self.written = [n + s for n in self.written]
        self.index = self._last(kept)
        put(self.positions, self.index, positions[:, s - kept :])
        self.furthest = list(map(max, self.furthest, self.written))
        self.visible = self.positions[:, : min(start + s, self.n)] if beside is None else beside

    def append(self, store: Tensor, new: Tensor) -> Tensor:
        """Write the chunk of one layer, (b, heads, s, dim), and return what it attends to, (b, heads, k, dim)."""
        if self.in_place:
            put(store, self.index, new)
            return store[:, :, : self.visible.shape[1]]
        seen = torch.cat([store[:, :, : self.old], new], dim=2)
        put(store, self.index, new[:, :, -min(new.shape[2], self.n) :])
        return seen

    def reorder(self, rows: Tensor) -> None:
        """Row i continues what row rows[i] held."""
        self.positions = self.positions.index_select(0, rows)
        self.written, self.furthest = ([held[row] for row in rows.tolist()] for held in (self.written, self.furthest))

    def can_rewind(self, ns: list[int]) -> bool:
        """Whether each row still has all that it sees without its last n tokens: a ring that has wrapped around can go back to
        `furthest` - slack tokens."""
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
        """Takes over the positions of the last tokens of `rows` of other Slots into its own rows `at`; returns the slots of these
        tokens, here and there."""
        k = min(self.written[0], self.n, max(other.written))
        here, there = self._last(k), other._last(k)
        here = here if isinstance(here, slice) else here[at]
        put(self.positions[at], here, get(other.positions, there, rows))  # -1 in front of a row that is shorter than others there
        return here, there

    def where_first(self, n: int) -> Tensor:
        """Returns the slots of each row's first n tokens, (b, n); any slot, where a row has fewer."""
        numbers = torch.arange(n, device=self.positions.device)[:, None]
        return (self.positions[:, None] == numbers).int().argmax(-1)  # (b, 1, slots) -> (b, n, slots) -> (b, n)

    def _last(self, length: int) -> slice | Tensor:
        """Returns the slots of each row's last tokens: a slice where all rows are equally long and the ring does not wrap around within
        it, or else indices (b, length)."""
        first = (self.written[0] - length) % self.n
        even = min(self.written) == max(self.written)
        return slice(first, first + length) if even and first + length <= self.n else self._places(length)

    def _places(self, length: int) -> Tensor:
        ends = torch.tensor(self.written, device=self.positions.device).unsqueeze(1)
        return (ends + torch.arange(-length, 0, device=ends.device)) % self.n  # (b, length)


class FirstSlots(Slots):
    """A ring, behind it reserved slots for the first tokens of each row, and one more slot, to which all other tokens are written."""

    def __init__(self, batch: int, n: int, slack: int, device: torch.device, first: int) -> None:
        super().__init__(batch, n, slack, device)
        self.places = n + first + 1
        self.first, self.numbers = first, torch.arange(first, device=device)
        self.own: Tensor = self.positions[:, :0]

    def begin(self, positions: Tensor) -> None:
        """As in `Slots`; the first tokens have reserved slots too."""
        before = max(self.written)
        super().begin(positions)
        self.keep(positions)
        if before > 0:
            self.look()

    def keep(self, positions: Tensor) -> None:
        """Set the reserved slots to which tokens at these positions, (b, s), are written beside the ring."""
        self.own = self.n + torch.where((positions >= 0) & (positions < self.first), positions, self.first)

    def look(self) -> None:
        """Once anything is cached, show the first tokens in their reserved slots, and hide them in the ring, which may have wrapped
        around, and been rewound since."""
        seen = self.positions if self.in_place else self.visible
        self.visible = torch.cat([seen.masked_fill(seen < self.first, -1), self.numbers.expand(len(seen), -1)], dim=1)

    def append(self, store: Tensor, new: Tensor) -> Tensor:
        put(store, self.own, new)
        seen = super().append(store, new)
        if seen.shape[2] == self.visible.shape[1]:
            return seen
        return torch.cat([seen, store[:, :, self.n : self.n + self.first]], dim=2)

    def where_first(self, n: int) -> Tensor:
        return self.n + self.numbers[:n].expand(len(self.written), -1)


def get(of: Tensor, where: slice | Tensor, rows: Tensor) -> Tensor:
    """Returns what `put` has written to these slots of these rows."""
    if isinstance(where, slice):
        return of[(slice(None),) * (of.ndim // 2) + (where,)].index_select(0, rows)
    where, of = where[rows], of.index_select(0, rows)
    return of.gather(of.ndim // 2, where if of.ndim == 2 else where[:, None, :, None].expand(-1, of.shape[1], -1, of.shape[3]))


def put(into: Tensor, where: slice | Tensor, new: Tensor) -> None:
    """Writes to slots.  into: (b, k) or (b, heads, k, dim), where k is dimension ndim // 2; where: a slice of k, or (b, s)."""
    if isinstance(where, slice):
        into[(slice(None),) * (into.ndim // 2) + (where,)] = new
    elif len(where) == 1:
        into.index_copy_(into.ndim // 2, where[0], new.to(into.dtype))  # a GPU takes half the time of the other one
    else:
        into.scatter_(into.ndim // 2, (where if into.ndim == 2 else where[:, None, :, None]).expand_as(new), new.to(into.dtype))
