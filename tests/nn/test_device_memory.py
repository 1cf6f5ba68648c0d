"""Which errors say that memory was refused."""

import errno

import pytest

from lm.nn.device_memory import out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError(errno.ENOMEM, "no words"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried 1 bytes"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("MPS backend out of memory (MPS allocated: 9.0 GiB, other: 1.0 GiB, max allowed: 9.1 GiB)."),
        RuntimeError("Invalid buffer size: 32.00 GiB"),
    ],
)
def test_refused_memory_is_known_by_its_words(error: Exception) -> None:
    assert out_of_memory(error)


def test_other_errors_are_not_of_memory() -> None:
    assert not any(map(out_of_memory, (RuntimeError("shapes differ"), OSError(errno.ENOENT, "No such file"), ValueError("memory"))))
