"""Expert parallelism: each rank holds some of the experts; tokens go to the ranks of their experts, and the outputs come back.

Lepikhin et al. 2020, arXiv:2006.16668, section 3.2, without a capacity: every token arrives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from lm.ops.experts import Sorting
from lm.ops.once_differentiable import once_differentiable
from lm.ops.ranks.tensor_parallel import TensorParallel

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(t, d) tokens, (t, k) their experts and the weights of these -> (t, d)."""


class Dispatch:
    """Exchanges tokens between ranks, all of which must make each call. It waits for the numbers of tokens that they send each other."""

    def __init__(self, ranks: TensorParallel, n_experts: int) -> None:
        self._ranks, parts = ranks, [ranks.part(n_experts, rank) for rank in range(ranks.n)]
        self._sizes, self._n_experts = [part.stop - part.start for part in parts], n_experts

    def __call__(self, run: Run, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Returns what `run` would return if it had the experts of all ranks.  run: computes with the experts of this rank."""
        sorting = Sorting(experts, self._n_experts)  # by expert, so that what a rank is sent lies side by side
        sent, come, each = self._counts(sorting.chosen)
        rows: Tensor = _Sent.apply(sorting.spread(x), self._ranks.group, sent, come)  # (t*k, d) -> (m, d)
        mine = torch.arange(each.shape[1], device=x.device).repeat(len(each)).repeat_interleave(each.flatten())  # (m,)
        made = run(rows, mine.unsqueeze(1), weights.new_ones(len(mine), 1))
        back: Tensor = _Sent.apply(made, self._ranks.group, come, sent)  # (m, d) -> (t*k, d)
        return sorting.gather(back, weights)

    def _counts(self, chosen: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Returns how many tokens go to each rank, and how many come from each; and (ranks, e) the latter by the experts of this rank."""
        counts, ranks = torch.bincount(chosen, minlength=self._n_experts), self._ranks
        here = self._sizes[ranks.rank]
        each = _exchanged(counts, ranks.group, self._sizes, [here] * ranks.n).view(-1, here)
        sent, come = torch.stack([part.sum() for part in counts.split(self._sizes)] + [*each.sum(1)]).view(2, -1).tolist()
        return sent, come, each


class _Sent(torch.autograd.Function):
    """Rows sent to each rank and received from each, in the order of the ranks (all-to-all). Its gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, sent: list[int], come: list[int]) -> Tensor:
        ctx.way = group, come, sent
        return _exchanged(x, group, sent, come)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], *ctx.way), None, None, None


def _exchanged(x: Tensor, group: Any, sent: list[int], come: list[int]) -> Tensor:
    found = x.new_empty(sum(come), *x.shape[1:])
    distributed.all_to_all_single(found, x.contiguous(), come, sent, group)
    return found
