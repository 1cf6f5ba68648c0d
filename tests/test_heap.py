"""Memory that is freed goes back to the system where it is asked to."""

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import on_linux


def held_mib() -> float:
    found = re.search(r"^RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


# In a process of its own: another's heap may have room for the blocks between what is kept, from where nothing goes back.
FREES = """
import numpy
from lm import heap
from tests.test_heap import held_mib
numpy.ones(1 << 21)  # freed at once: blocks of up to its size stay from now on
with heap.returned():
    blocks = [numpy.ones(1 << 17) for _ in range(64)]  # 64 MiB
    before, kept = held_mib(), blocks[-1]
    del blocks
    print(before - held_mib())
blocks = [numpy.ones(1 << 17) for _ in range(40)]
before = held_mib()
del blocks
print(before - held_mib())
"""


@on_linux
def test_what_is_freed_within_goes_back_and_behind_it_stays() -> None:
    done = subprocess.run([sys.executable, "-c", FREES], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    within, behind = map(float, done.stdout.split())
    assert within > 60 and behind < 20
