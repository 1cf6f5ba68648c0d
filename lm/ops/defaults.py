"""What a program may have set in torch for all that it does next, such as a notebook in its first cell."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch

MAC_SINCE = "2.14"
"""The torch that a Mac's GPU needs. Before it products of over 32,768 terms, as for the gradient below the head of a large vocabulary, are
wrong on an M1 and M2 (pytorch/pytorch#183535), and before 2.13 the fused AdamW takes steps that it is told to skip (#186360)."""


def default_kind() -> str:
    """Returns the kind of device that `auto` stands for. A Mac's GPU has to be asked for: no test has run on one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def why_not_mac() -> str | None:
    """Returns why nothing can be computed on a Mac's GPU here; None where it can."""
    if not torch.backends.mps.is_available():
        return "torch finds no GPU of a Mac here"
    if torch.__version__ < MAC_SINCE:
        return f"torch before {MAC_SINCE} computes wrongly there, without a word, and this is {torch.__version__}"
    return None


@contextmanager
def device_unset() -> Iterator[None]:
    """Within the block, or the function that it decorates, tensors without a device are made on the CPU, whatever
    `torch.set_default_device` has said."""
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield


@contextmanager
def unset() -> Iterator[None]:
    """Within the block tensors are float32 and on the CPU unless made otherwise, without inference mode and autocast, as in the process of
    a command."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        for block in (device_unset(), torch.inference_mode(False)):
            stack.enter_context(block)
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
