"""Which query sees which key, as a description that each attention backend turns into its own form."""

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lm.ops.compiling import written_out
from lm.ops.ranks.ulysses import UNSHARDED, RowSharding

T = TypeVar("T")


@dataclass
class Mask:
    """A query sees a key of its own document, not hidden (position >= 0), not later if causal, and less than `window` tokens away, or among
    the `first` tokens of the document, however far away; with `chunked` windows, in the same chunk of so many tokens, counted from the
    start of the document.

    Positions are (b, q) and (b, k); b may be 1. `square` says that both are 0..s-1 in one document, the case for which fused kernels need
    no mask. `k_prefix` (b, k) marks keys that earlier queries see too (prefix LM); `explicit` (b, 1 or h, q, k) hides more where False.
    """

    q_positions: Tensor
    k_positions: Tensor
    q_documents: Tensor | None = None
    k_documents: Tensor | None = None
    causal: bool = True
    square: bool = False
    k_prefix: Tensor | None = None
    explicit: Tensor | None = None
    horizon: int | None = None  # a window of all layers, beside each layer's own
    padded: bool = True  # positions may be -1; False: none is, and each query sees itself
    sharding: RowSharding = UNSHARDED  # how ranks share the rows; all fields here are of whole rows
    _built: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def cached(self) -> bool:
        """True where keys come from a cache or a memory, and False where queries and keys are the same tokens."""
        return self.k_positions is not self.q_positions

    def require_causal(self, kind: str) -> None:
        """Raises ValueError where the mask is explicit or not causal, for a mixer, called `kind`, that reads from left to right."""
        if self.explicit is not None or not self.causal:
            raise ValueError(f"{kind} reads from left to right, and knows no other mask. Use attention for it.")

    def plain(self, window: int | None) -> Literal["causal", "full"] | None:
        """Returns causal where the mask is the lower triangle and nothing else, full where it hides nothing, and None for other masks."""
        if not self.square or self.k_prefix is not None or self.explicit is not None:
            return None
        if window is not None and window < self.k_positions.shape[1]:
            return None
        return "causal" if self.causal else "full"

    def allowed(self, window: int | None, first: int = 0, chunked: bool = False) -> Tensor:
        """True where the query may see the key, (b, 1 or h, q, k); built once per window."""
        return self.once(("allowed", window, first, chunked), lambda: self._build(window, first, chunked))

    def additive(self, dtype: torch.dtype, window: int | None, first: int, chunked: bool) -> Tensor:
        """Returns `allowed` as a bias on scores, 0 or -inf: kernels would convert booleans anew in each layer."""
        allowed, key = self.allowed(window, first, chunked), ("additive", window, first, chunked, dtype)
        return self.once(key, lambda: torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf")))

    def blind(self, window: int | None, first: int = 0, chunked: bool = False) -> Tensor | None:
        """True where a query sees no key, (b, 1 or h, q, 1); None where every query sees itself."""
        if not self.padded and self.explicit is None:
            return None
        return self.once(("blind", window, first, chunked), lambda: ~self.allowed(window, first, chunked).any(-1, keepdim=True))

    def once(self, key: Hashable, build: Callable[[], T]) -> T:
        """Returns what `build` returns, kept by `key` for later layers: a backend's own form of this mask, or a bias.

        Tensors that its gradient needs are saved even within activation checkpointing: when the first layer to ask is recomputed, it finds
        the result here and builds nothing.
        """
        if key not in self._built:
            with nullcontext() if written_out() else saved_tensors_hooks(_as_it_is, _as_it_is):
                self._built[key] = build()
        found: T = self._built[key]
        return found

    def of_keys(self, at: Tensor) -> "Mask":
        """Returns the mask over the keys of these slots of a cache alone.  at: (b, n)."""

        def of(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.expand(len(at), -1).gather(1, at)

        assert self.explicit is None
        k_positions, documents = self.k_positions.expand(len(at), -1).gather(1, at), of(self.k_documents)
        return replace(self, k_positions=k_positions, k_documents=documents, k_prefix=of(self.k_prefix), square=False, _built={})

    def by_position(self) -> tuple[Tensor, Tensor]:
        """Returns which slot of a cache has its n-th token, hidden ones first, and for each slot n, (b, k) each."""

        def build() -> tuple[Tensor, Tensor]:
            order = self.k_positions.argsort(dim=1, stable=True)
            return order, order.argsort(dim=1)

        return self.once("by_position", build)

    def _build(self, window: int | None, first: int, chunked: bool) -> Tensor:
        q, k = self.q_positions.unsqueeze(-1), self.k_positions.unsqueeze(-2)  # (b, q) -> (b, q, 1), (b, k) -> (b, 1, k)
        seen = (k >= 0) & (q >= 0)
        if self.causal:
            earlier = k <= q
            seen = seen & (earlier if self.k_prefix is None else earlier | self.k_prefix.unsqueeze(-2))
        for limit in (window, self.horizon):
            if limit is not None:
                near = (q - k).abs() < limit
                seen = seen & (near | (k < first) if first else near)
        if chunked and window is not None:
            seen = seen & (q // window == k // window)
        if self.q_documents is not None and self.k_documents is not None:
            seen = seen & (self.q_documents.unsqueeze(-1) == self.k_documents.unsqueeze(-2))
        seen = seen.unsqueeze(1)  # (b, q, k) -> (b, 1, q, k)
        return seen if self.explicit is None else seen & self.explicit


def arange_positions(s: int, device: torch.device, start: int = 0) -> Tensor:
    """Returns start..start+s-1 as (1, s): positions of rows that are one document each."""
    return torch.arange(start, start + s, device=device).unsqueeze(0)


def _as_it_is(x: Tensor) -> Tensor:
    return x
