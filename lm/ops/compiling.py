"""Where functions of ours are compiled by themselves, whether the model around them is or not."""

from functools import cache
from importlib.util import find_spec

import torch

_KINDS = 64  # of calls of a function that may be compiled in a process: of shapes, of models, with and without gradients
CAPABILITY = (8, 0)  # of a GPU that Triton is sure to serve


def why_not_compiled(device: torch.device) -> str | None:
    """Why kernels are not compiled for this CUDA device; None where they are."""
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
    return None if has_triton() else "triton is not installed"


def expect_kinds() -> None:
    """Lets a function be compiled for more kinds of calls than the eight that torch expects, behind which it would run uncompiled."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _KINDS)


@cache
def has_triton() -> bool:
    """Returns whether Triton can be imported, which compiles kernels for GPUs."""
    return find_spec("triton") is not None


def written_out() -> bool:
    """Whether operations are to be in their plain form: for a compiler, which fuses them itself, and where they are `transformed`."""
    return torch.compiler.is_compiling() or transformed()


def transformed() -> bool:
    """Whether a transform of torch.func is at work, such as vmap or grad, which knows no gradient that is written by hand."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
