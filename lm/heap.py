"""glibc's heap: whether memory that is freed goes back to the system. Nothing here has an effect with another C library."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_kept = 1 << 25, 1 << 26  # blocks and ends of the heap up to so many bytes stay; these are glibc's own, once it has freed a large block


def keep_freed() -> None:
    """From now on what is freed stays. Otherwise each step of a CPU run faults the memory of its activations in anew: 4 to 10 % of the
    step, and up to 28 % where AMX makes the rest fast."""
    global _kept
    _kept = 1 << 30, (1 << 31) - 1
    _set(*_kept)


@contextmanager
def returned() -> Iterator[None]:
    """What is freed within the block goes back. Matrices that are replaced one by one leave holes, into which others do not fit: a process
    that loads float32 as int8 would hold all of float32 to its end."""
    _set(1 << 16, 1 << 17)
    try:
        yield
    finally:
        _set(*_kept)


def _set(mmap_threshold: int, trim_threshold: int) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
    mallopt(_M_TRIM_THRESHOLD, trim_threshold)
