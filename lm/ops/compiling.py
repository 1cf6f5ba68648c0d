"""Where functions of ours are compiled by themselves, whether the model around them is or not."""

from functools import cache
from importlib.util import find_spec

import torch

CAPABILITY = (8, 0)  # of a GPU that Triton is sure to serve


def why_not_compiled(device: torch.device) -> str | None:
    """Why kernels are not compiled for this CUDA device; None where they are."""
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
    return None if has_triton() else "triton is not installed"


@cache
def has_triton() -> bool:
    """Returns whether Triton can be imported, which compiles kernels for GPUs."""
    return find_spec("triton") is not None
