"""Matrices that several ranks hold in slices, beside slices of the same rows.

Shoeybi et al. 2019, arXiv:1909.08053, section 3, with the rows cut outside of them: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn

from lm.nn.mixers.ulysses import WHOLE, Slices, summed


class Divisible(nn.Module):
    """A sublayer that ranks may compute together, each some heads or some of the inner width: what they give adds up to its output.

    It is called with (b, s, d) and the Context, and returns (b, s, d).
    """

    cut: ClassVar[Mapping[str, int]] = {}
    """By name of each weight of which ranks hold slices the dimension that is cut: 0, what it gives; 1, what it reads."""

    @classmethod
    def cut_by(cls, outputs: Iterable[str], *inputs: str) -> Mapping[str, int]:
        """Returns that of linear layers: those that are cut by what they give, biases too, and those by what they read."""
        given = {f"{name}.{key}": 0 for name in outputs for key in ("weight", "bias")}
        return given | {f"{name}.weight": 1 for name in inputs}


class Columns(Slices):
    """Between sublayers a rank has its slice of the row; within them all tokens of it, and its slice of the matrices."""

    def within(self, x: Tensor) -> Tensor:
        return x

    def divide(self, module: Divisible) -> set[nn.Parameter]:
        """Leaves this rank its slices, which are returned, and has the module gather what it reads and sum what it gives."""
        mine, weights = set(), dict(module.named_parameters())
        for name, dim in module.cut.items():
            if name in weights:
                part = nn.Parameter(weights[name].detach().chunk(self.n, dim)[self.rank].clone(), weights[name].requires_grad)
                linear, _, key = name.rpartition(".")
                setattr(module.get_submodule(linear), key, part)
                mine.add(part)
                if dim == 1 and f"{linear}.bias" in weights:
                    module.get_submodule(linear).register_forward_hook(self._with_part_of_bias)
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave)
        return mine

    def _with_part_of_bias(self, linear: Any, args: Any, out: Tensor) -> Tensor:
        """What all ranks give is summed, the bias too."""
        return out - linear.bias * (1 - 1 / self.n)

    def _enter(self, module: nn.Module, args: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        x, ctx = args
        return (x if ctx.mask.held is WHOLE else _Gathered.apply(x, self._group, self.n)), ctx  # (b, s, d) -> (b, n*s, d)

    def _leave(self, module: nn.Module, args: tuple[Tensor, Any], out: Tensor) -> Tensor:
        """Rows that are whole, as where a model is evaluated, stay so."""
        if args[1].mask.held is WHOLE:
            return summed(out, self._group)
        found: Tensor = _Scattered.apply(out, self._group, self.n)  # (b, n*s, d) -> (b, s, d)
        return found


class _Gathered(torch.autograd.Function):
    """The tokens of all ranks. Its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, n: int) -> Tensor:
        ctx.way = group, n
        return _gathered(x, group, n)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grads[0], *ctx.way), None, None


class _Scattered(torch.autograd.Function):
    """This rank's tokens of the sum over all ranks. Its gradient is that of all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, n: int) -> Tensor:
        ctx.way = group, n
        return _scattered(x, group, n)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grads[0], *ctx.way), None, None


def _gathered(x: Tensor, group: Any, n: int) -> Tensor:
    come = x.new_empty(n * len(x), *x.shape[1:])
    distributed.all_gather_into_tensor(come, x.contiguous(), group=group)
    return torch.cat(come.chunk(n), 1)  # (n*b, s, d) -> (b, n*s, d)


def _scattered(x: Tensor, group: Any, n: int) -> Tensor:
    come = x.new_empty(len(x), x.shape[1] // n, *x.shape[2:])
    distributed.reduce_scatter_tensor(come, torch.cat(x.chunk(n, 1)), group=group)  # (b, n*s, d) -> (n*b, s, d)
    return come
