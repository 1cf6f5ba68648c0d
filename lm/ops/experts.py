"""Products of rows with the matrix of the expert that each of them goes to."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.ops.linear import product


def by_expert(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, chosen: Tensor) -> Tensor:
    """x[rows of expert i] @ weight[i]^T + bias[i].  x: (n, in), rows of one expert side by side, up to
    `ends`, (e,) int32; chosen: (n,) the expert of each row."""
    aligned = weight.shape[-1] % 8 == 0 and weight.shape[-2] % 8 == 0
    if x.device.type in ("cuda", "meta") and x.dtype == torch.bfloat16 and aligned:  # what the grouped kernel takes
        out = F.grouped_mm(x, weight.to(x.dtype).transpose(-1, -2), offs=ends)
    elif torch.compiler.is_compiling():
        out = _one_operation(x, weight.to(x.dtype), ends)
    else:
        out = _matmul(x, weight, ends)
    return out if bias is None else out + bias[chosen].to(out.dtype)


def _rows(x: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return x.split(ends.diff(prepend=ends.new_zeros(1)).tolist())


def _matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.cat([product(rows, w) for rows, w in zip(_rows(x, ends), weight.unbind(), strict=True)])


_one_operation = torch.library.custom_op("lm::matmul_by_expert", _matmul, mutates_args=())
"""_matmul, into which a compiler does not look: it cannot follow sizes that depend on numbers, and would cut the model apart there."""


@torch.library.custom_op("lm::outer_by_expert", mutates_args=())
def _outer(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return torch.stack([g.t() @ rows for g, rows in zip(_rows(grad, ends), _rows(x, ends), strict=True)])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    return _one_operation(grad, weight.transpose(-1, -2), ends), _outer(grad, x, ends) if ctx.needs_input_grad[1] else None, None


_one_operation.register_fake(lambda x, weight, ends: x.new_empty(len(x), weight.shape[1]))
_outer.register_fake(lambda grad, x, ends: x.new_empty(len(ends), grad.shape[1], x.shape[1]))
_one_operation.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
