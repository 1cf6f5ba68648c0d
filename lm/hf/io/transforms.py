"""Transforms of tensors between a Hugging Face file (there) and a model of ours (here), each with its inverse, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Transform(Protocol):
    """Turns the tensors of one `Pair` on one side into those on the other."""

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]: ...

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]: ...


class Same:
    """One tensor, as it is."""

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        return theirs

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return ours


class Transpose:
    """(..., in, out) there, (..., out, in) here; vectors as they are."""

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        return [t.transpose(-1, -2) if t.ndim > 1 else t for t in theirs]

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return self.to_ours(ours)


@dataclass(frozen=True)
class Split:
    """One tensor there, several here, one after another along the first dimension."""

    sizes: Sequence[int]

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        return list(theirs[0].split(list(self.sizes)))

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return [torch.cat(ours)]


@dataclass(frozen=True)
class Join:
    """Several tensors there, of which the first ones, with these sizes, are one tensor here, one below the other; the others stay."""

    sizes: Sequence[int]

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        return [torch.cat(theirs[: len(self.sizes)]), *theirs[len(self.sizes) :]]

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return [*ours[0].split(list(self.sizes)), *ours[1:]]


@dataclass(frozen=True)
class SplitHeads:
    """One tensor there, several here; for each head its rows are so many rows (sizes) of each of ours in turn."""

    n_heads: int
    sizes: Sequence[int]

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        parts = theirs[0].unflatten(0, (self.n_heads, -1)).split(list(self.sizes), dim=1)  # (h*sum, ...) -> (h, size, ...)
        return [part.flatten(0, 1) for part in parts]

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return [torch.cat([t.unflatten(0, (self.n_heads, -1)) for t in ours], dim=1).flatten(0, 1)]


@dataclass(frozen=True)
class Neighbours:
    """The rows of each head of so many; of the first `rotated` of them, pairs that are neighbours here are half of them apart there."""

    head_dim: int
    rotated: int

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        turned, rest = self._parts(theirs[0])
        return [torch.cat([torch.stack(turned.chunk(2, dim=1), dim=2).flatten(1, 2), rest], dim=1).flatten(0, 1)]

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        turned, rest = self._parts(ours[0])
        return [torch.cat([turned[:, 0::2], turned[:, 1::2], rest], dim=1).flatten(0, 1)]

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = x.unflatten(0, (-1, self.head_dim))
        return heads[:, : self.rotated], heads[:, self.rotated :]


@dataclass(frozen=True)
class ExchangeHalves:
    """The rows of each head, of which the first and the second half change places."""

    head_dim: int

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        return [t.unflatten(0, (-1, 2, self.head_dim // 2)).flip(1).flatten(0, 2) for t in theirs]  # (h*c, ...) -> (h, 2, c/2, ...)

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return self.to_ours(ours)


class Stack:
    """Several tensors there, one for each expert; here one tensor with a new first dimension."""

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        return [torch.stack(theirs)]

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return list(ours[0].unbind())


class Halves:
    """One tensor there, (e, 2 out, in); here two of the shape (e, out, in), which are its upper and lower half."""

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        return list(theirs[0].chunk(2, dim=-2))

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return [torch.cat(ours, dim=-2)]


class Alternate:
    """One tensor there whose last dimension alternates between two tensors here (gpt-oss: gate, up, gate, up, ...)."""

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        return [theirs[0][..., 0::2], theirs[0][..., 1::2]]

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return [torch.stack(ours, dim=-1).flatten(-2)]


@dataclass(frozen=True)
class SkipRows:
    """The first rows there have no counterpart here; they are written as zeros (BART's positions start at 2)."""

    n: int

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        return [theirs[0][self.n :]]

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return [torch.cat([torch.zeros_like(ours[0][: self.n]), ours[0]])]


class Row:
    """(1, n) there, (n,) here."""

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        return [theirs[0].squeeze(0)]

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return [ours[0].unsqueeze(0)]


@dataclass(frozen=True)
class Shaped:
    """A vector here, there the same numbers in this shape, of which -1 is their number."""

    shape: Sequence[int]

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        return [theirs[0].flatten()]

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return [ours[0].reshape(tuple(self.shape))]


@dataclass(frozen=True)
class Flat:
    """(w, n) there, (w*n,) here."""

    n: int

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        return [theirs[0].flatten()]

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return [ours[0].unflatten(0, (-1, self.n))]


class Squeeze:
    """(c, 1, n) there, the kernel of a depthwise convolution; (c, n) here."""

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        return [theirs[0].squeeze(1)]

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return [ours[0].unsqueeze(1)]


@dataclass(frozen=True)
class Copies:
    """n equal tensors there, one here (encoder-decoders whose head is not tied: one embedding, stored for each stack)."""

    n: int

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        if not all(torch.equal(theirs[0], other) for other in theirs[1:]):
            raise ValueError(f"{self.n} tensors that are one here are not equal")
        return theirs[:1]

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return [ours[0].clone() for _ in range(self.n)]


@dataclass(frozen=True)
class Chain:
    """`first`, then `second`, to our side; their inverses in reverse order to the other."""

    first: Transform
    second: Transform

    def to_ours(self, theirs: list[Tensor]) -> list[Tensor]:
        return self.second.to_ours(self.first.to_ours(theirs))

    def to_theirs(self, ours: list[Tensor]) -> list[Tensor]:
        return self.first.to_theirs(self.second.to_theirs(ours))
