"""Whether something fits the memory of this machine at all, asked before it is built, and whether an error says that it did not."""

import errno
import os

import torch

from lm.errors import ResourceError


def require_memory(needed_bytes: int, device: torch.device | str, what: str) -> None:
    """Raises ResourceError where needed_bytes exceed all memory of the device. Linux would grant them, and kill the process later."""
    device = torch.device(device)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    there = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host
    if needed_bytes > there:
        sizes = f"{needed_bytes / 2**30:,.1f} GiB for {what} are more than the {there / 2**30:,.1f} GiB of memory here"
        raise ResourceError(f"memory: {sizes}. Lower the model's size, data.seq_len or trainer.micro_batch.")


def out_of_memory(error: BaseException) -> bool:
    """Returns whether torch, numpy or the system had no memory to give. A Mac's GPU calls a tensor that it cannot hold an invalid buffer
    size."""
    said = any(words in str(error).lower() for words in ("alloc", "out of memory", "invalid buffer size"))
    return said or isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
