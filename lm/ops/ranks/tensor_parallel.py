"""Tensor parallelism: ranks hold slices of matrices and, between sublayers, slices of the same rows.

Shoeybi et al. 2019, arXiv:1909.08053, section 3; rows in slices: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn

from lm.ops.once_differentiable import once_differentiable
from lm.ops.ranks.ulysses import UNSHARDED, ShardedRows, summed


class Divisible(nn.Module):
    """A sublayer that ranks compute together: each has some of the heads or of the inner width, and their outputs add up to the whole
    one. It is called with (b, s, d) and the Context, and returns (b, s, d). Modules of other kinds override `join`."""

    cut: ClassVar[Mapping[str, int]] = {}
    """By name of each weight of which ranks hold slices the dimension that is cut: 0, what it gives; 1, what it reads."""

    @classmethod
    def cut_by(cls, outputs: Iterable[str], *inputs: str) -> Mapping[str, int]:
        """Returns `cut` for linear layers: `outputs` are cut along their output dimension, biases too, `inputs` along the input's."""
        given = {f"{name}.{key}": 0 for name in outputs for key in ("weight", "bias")}
        return given | {f"{name}.weight": 1 for name in inputs}

    def join(self, ranks: "TensorParallel", sizes: Mapping[str, int]) -> None:
        """Called when only this rank's slices are left.  sizes: the whole size of the cut dimension, by name of each cut weight."""
        self.register_forward_pre_hook(ranks.enter)
        self.register_forward_hook(ranks.leave)


class TensorParallel(ShardedRows):
    """Between sublayers a rank has its slice of each row; within a sublayer, all tokens of the row and its slice of the matrices."""

    def for_sublayer(self, x: Tensor) -> Tensor:
        return x

    def part(self, size: int, rank: int | None = None) -> slice:
        """Returns which of `size` items a rank has, in slices whose sizes differ by at most one.  rank: None: this one."""
        rank = self.rank if rank is None else rank
        return slice(size * rank // self.n, size * (rank + 1) // self.n)

    def divide(self, module: Divisible) -> set[nn.Parameter]:
        """Cuts the module's weights to this rank's slices, which are returned, and has it exchange inputs and outputs between ranks."""
        weights, mine, sizes = dict(module.named_parameters()), set(), {}
        for name, dim in module.cut.items():
            if name in weights:
                sizes[name] = weights[name].shape[dim]
                whole, at = weights[name].detach().movedim(dim, 0), self.part(sizes[name])
                part = nn.Parameter(whole[at].movedim(0, dim).clone(), weights[name].requires_grad)
                linear, _, key = name.rpartition(".")
                setattr(module.get_submodule(linear), key, part)
                mine.add(part)
                if dim == 1 and f"{linear}.bias" in weights:
                    module.get_submodule(linear).register_forward_hook(self._with_part_of_bias)
        module.join(self, sizes)
        return mine

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns the tokens of all ranks, (b, s, ...) -> (b, n*s, ...)."""
        found: Tensor = _AllGather.apply(x, self.group, self.n)
        return found

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens of the sum over all ranks, (b, n*s, ...) -> (b, s, ...)."""
        found: Tensor = _ReduceScatter.apply(x, self.group, self.n)
        return found

    def enter(self, module: nn.Module, args: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Hook before a sublayer: where rows are in slices, gathers all tokens."""
        x, ctx = args
        return (x if ctx.mask.sharding is UNSHARDED else self.all_gather(x)), ctx

    def leave(self, module: nn.Module, args: tuple[Tensor, Any], out: Tensor) -> Tensor:
        """Hook after a sublayer: sums the outputs of all ranks; where rows are in slices, keeps this rank's. In evaluation rows are
        whole."""
        return summed(out, self.group) if args[1].mask.sharding is UNSHARDED else self.reduce_scatter(out)

    def _with_part_of_bias(self, linear: Any, args: Any, out: Tensor) -> Tensor:
        """Leaves 1/n of the bias in the output of each of n ranks, since their outputs are summed."""
        return out - linear.bias * (1 - 1 / self.n)


class _AllGather(torch.autograd.Function):
    """The tokens of all ranks (all-gather). Its gradient is summed over the ranks (reduce-scatter)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, n: int) -> Tensor:
        ctx.way = group, n
        return _all_gather(x, group, n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grads[0], *ctx.way), None, None


class _ReduceScatter(torch.autograd.Function):
    """This rank's tokens of the sum over all ranks (reduce-scatter). Its gradient is that of all tokens (all-gather)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, n: int) -> Tensor:
        ctx.way = group, n
        return _reduce_scatter(x, group, n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grads[0], *ctx.way), None, None


def _all_gather(x: Tensor, group: Any, n: int) -> Tensor:
    come = x.new_empty(n * len(x), *x.shape[1:])
    distributed.all_gather_into_tensor(come, x.contiguous(), group=group)
    return torch.cat(come.chunk(n), 1)  # (n*b, s, d) -> (b, n*s, d)


def _reduce_scatter(x: Tensor, group: Any, n: int) -> Tensor:
    come = x.new_empty(len(x), x.shape[1] // n, *x.shape[2:])
    distributed.reduce_scatter_tensor(come, torch.cat(x.chunk(n, 1)), group=group)  # (b, n*s, d) -> (n*b, s, d)
    return come
