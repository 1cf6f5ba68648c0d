"""W x + b by the fastest kernel of this machine."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.ops.compiling import transformed
from lm.ops.once_differentiable import once_differentiable

ONEDNN = {"mkldnn::_linear_pointwise", "lm::multiplied"}
_WORTH = 1 << 23  # multiplications; with fewer, the call costs what the kernel saves: two cores of an AMD EPYC, torch 2.13


def _mkl_is_slow() -> bool:
    """Whether oneDNN is faster than MKL, which torch uses for float32 and which has AVX-512 on Intel's processors only. By the
    processor's name, not by timing, so that runs repeat to the bit."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return False
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return both and "AuthenticAMD" in told and "avx512f" in told


_MKL_IS_SLOW = _mkl_is_slow()


def by_onednn(x: Tensor, multiplications: int) -> bool:
    """Whether a product of x is made by oneDNN."""
    worth = x.dtype == torch.float32 and _MKL_IS_SLOW and multiplications >= _WORTH
    return x.is_cpu and (worth or x.dtype in (torch.bfloat16, torch.float16))


def recurring(n: int) -> int:
    """Returns n or up to an eighth more, so that few numbers of rows occur. oneDNN generates code for each, which takes ten times as long
    as running it (AMX, 512 rows)."""
    step = 1 << max(n.bit_length() - 4, 0)
    return -(-n // step) * step


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W x + b by the fastest kernel.  (..., in), (out, in) -> (..., out)."""
    if _takes(x, weight, x.numel() * len(weight)):
        out: Tensor = _OneDNN.apply(x, weight, bias)
        return out
    return F.linear(x, weight, bias)


def product_into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Writes W x, without a gradient.  x: (n, in), (out, in) -> (n, out)."""
    if _takes(x, weight, x.numel() * len(weight)):
        out.copy_(_by_kernel(x, weight))
    else:
        torch.mm(x, weight.t(), out=out)


def outer_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Writes a^T b, without a gradient.  (n, out), (n, in) -> (out, in)."""
    if _takes(a, b, a.numel() * b.shape[1]):
        out.copy_(_sum_of_outer(a, b))
    else:
        torch.mm(a.t(), b, out=out)


def _takes(a: Tensor, b: Tensor, multiplications: int) -> bool:
    """Whether a call of oneDNN itself pays, where torch would call MKL."""
    plain = type(a) is Tensor and a.ndim > 1 and type(b) in (Tensor, nn.Parameter)
    wide = a.dtype == b.dtype == torch.float32
    return wide and plain and by_onednn(a, multiplications) and not torch.is_autocast_enabled("cpu") and not transformed()


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out


_one_operation = torch.library.custom_op("lm::multiplied", _multiplied, mutates_args=())
"""_multiplied for a compiler, which takes the kernel for one of inference."""
_one_operation.register_fake(lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], len(weight)))


def _by_kernel(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return (_one_operation if torch.compiler.is_compiling() else _multiplied)(x, weight, bias)


class _OneDNN(torch.autograd.Function):
    """W x + b and both products of its backward by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _by_kernel(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        outs, ins = gradient.flatten(0, -2), x.flatten(0, -2)  # (..., out), (..., in) -> (n, out), (n, in)
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _by_kernel(gradient, weight.t()) if of_x else None,
            _sum_of_outer(outs, ins) if of_weight else None,
            outs.sum(0) if of_bias else None,
        )


def _sum_of_outer(a: Tensor, b: Tensor) -> Tensor:
    """a^T b. The kernel copies its first operand where that is transposed; let it be the smaller.  (n, out), (n, in) -> (out, in)."""
    return _by_kernel(b.t(), a.t()).t().contiguous() if a.shape[1] > b.shape[1] else _by_kernel(a.t(), b.t())
