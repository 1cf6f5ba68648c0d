"""Runs that repeat to the bit on a GPU, where some kernels add numbers in the order in which they happen to be ready."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Within the block, if `on`, torch uses kernels that add in a fixed order, and FlashAttention in place of cuDNN's, whose backward has
    no such order; Inductor chooses kernels without timing them. An operation that has no such kernel warns by its name."""
    if not on:
        yield
        return
    flags, mode, cudnn = torch.utils.deterministic, torch.get_deterministic_debug_mode(), torch.backends.cuda.cudnn_sdp_enabled()
    fills = flags.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        flags.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is for finding faults, and takes time
        torch.backends.cuda.enable_cudnn_sdp(False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="cumsum_cuda_kernel")  # within a row it adds in a fixed order
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        flags.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
