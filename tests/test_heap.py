"""Memory that is freed goes back to the system where it is asked to."""

import re
from pathlib import Path

import pytest
import torch

from lm import heap

on_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells what memory a process has, on Linux")


def held_mib() -> float:
    found = re.search(r"^RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


@on_linux
def test_what_is_freed_within_goes_back() -> None:
    with heap.returned():
        blocks = [torch.ones(1 << 18) for _ in range(64)]  # 64 MiB
        before, kept = held_mib(), blocks[-1]
        del blocks
        assert held_mib() < before - 60
    assert len(kept) == 1 << 18
