"""Context parallelism: several ranks hold shards of the same rows, and exchange tokens for heads around attention.

DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509, section 3.1.
"""

from math import gcd
from typing import Any

import torch
from torch import Tensor, distributed

from lm.ops.once_differentiable import once_differentiable


class RowSharding:
    """How ranks share the rows of a batch. This class: not at all, each rank has whole rows of its own. Subclasses cut and exchange."""

    def row_len(self, s: int) -> int:
        """Returns the length of a whole row, of which this rank holds s tokens."""
        return s

    def shard(self, x: Tensor) -> Tensor:
        """Returns this rank's shard of x, which is of whole rows, (b, n*s) -> (b, s)."""
        return x

    def for_sublayer(self, x: Tensor) -> Tensor:
        """Returns the part of x, which is of whole rows, for the tokens that a sublayer reads: `shard`, or all with `TensorParallel`."""
        return self.shard(x)

    def own_heads(self, x: Tensor) -> Tensor:
        """Returns the part of x for the heads that this rank computes in attention, (h,) -> (h/n,)."""
        return x

    def by_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this rank's heads for all tokens of the row, given all heads for this rank's tokens, (b, h, s, c) -> (b, h/n, n*s, c)."""
        return q, k, v

    def by_tokens(self, heads: Tensor) -> Tensor:
        """Returns all heads for this rank's tokens, undoing `by_heads`, (b, h/n, n*s, c) -> (b, h, s, c)."""
        return heads

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over all ranks of x, each rank's sum over its own tokens; gradients go to all ranks."""
        return x


UNSHARDED = RowSharding()


class ShardedRows(RowSharding):
    """n ranks hold consecutive shards of the same rows, rank i the i-th. All ranks must make each call, in the same order."""

    def __init__(self, group: Any, rank: int, n: int) -> None:
        """group: the n ranks, a group of torch.distributed.  rank: within it."""
        self.group, self.rank, self.n = group, rank, n

    def row_len(self, s: int) -> int:
        return s * self.n

    def shard(self, x: Tensor) -> Tensor:
        return x.chunk(self.n, 1)[self.rank]  # (b, n*s) -> (b, s)

    def all_reduce(self, x: Tensor) -> Tensor:
        found: Tensor = _AllReduce.apply(x, self.group)
        return found


class Ulysses(ShardedRows):
    """Attention exchanges tokens for heads: each rank computes its share of the heads over whole rows."""

    def own_heads(self, x: Tensor) -> Tensor:
        return x.chunk(self.n)[self.rank]  # (h,) -> (h/n,)

    def by_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where n does not divide the number of key-value heads, these are repeated first, so that several ranks get the same one."""
        copies = repeats(k.shape[1], self.n)
        k, v = (x if copies == 1 else x.repeat_interleave(copies, 1) for x in (k, v))  # (b, g, s, c) -> (b, copies*g, s, c)
        return self._sent(q, 1, 2), self._sent(k, 1, 2), self._sent(v, 1, 2)

    def by_tokens(self, heads: Tensor) -> Tensor:
        return self._sent(heads, 2, 1)

    def _sent(self, x: Tensor, cut: int, joined: int) -> Tensor:
        found: Tensor = _AllToAll.apply(x, self.group, self.n, cut, joined)
        return found


def repeats(n_kv_heads: int, n: int) -> int:
    """Returns the fewest copies of each key head with which n ranks get equally many. Copies stay side by side, so that the queries of a
    rank find their keys in the same order."""
    return n // gcd(n_kv_heads, n)


class _AllToAll(torch.autograd.Function):
    """Cuts x into n parts along one dimension, sends part i to rank i, joins what is received along another. Its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, n: int, cut: int, joined: int) -> Tensor:
        ctx.way = group, n, joined, cut
        return _all_to_all(x, group, n, cut, joined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _all_to_all(grads[0], *ctx.way), None, None, None, None


def _all_to_all(x: Tensor, group: Any, n: int, cut: int, joined: int) -> Tensor:
    sent = torch.stack(x.chunk(n, cut))  # (b, h, s, c) -> (n, b, h/n, s, c), say
    come = torch.empty_like(sent)
    distributed.all_to_all_single(come, sent, group=group)
    return torch.cat(come.unbind(), joined)


class _AllReduce(torch.autograd.Function):
    """The sum over the ranks. Its gradient is the sum of the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return summed(grads[0], ctx.group), None


def summed(x: Tensor, group: Any) -> Tensor:
    """Returns the sum over the ranks of a group."""
    return reduced(x, group, distributed.ReduceOp.SUM)


def reduced(x: Tensor, group: Any, by: Any) -> Tensor:
    """Returns x reduced over all ranks of a group.  by: ReduceOp of sum, largest or smallest."""
    found = x.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(found, by, group)
    return found
