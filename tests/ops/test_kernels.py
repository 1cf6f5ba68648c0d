"""Recurrences by flash-linear-attention's kernels: equal to our own form under Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from lm.ops.recurrence import kernels
from lm.ops.recurrence.matrix import Flow


def test_documents_begin_where_their_number_changes_and_at_each_row() -> None:
    documents = torch.tensor([[0, 0, 1, 1], [1, 1, 1, -1]])
    assert kernels.bounds(documents).tolist() == [0, 2, 4, 7, 8]


def test_a_cpu_has_our_own_form() -> None:
    assert not kernels.serves(Flow(*(torch.zeros(1, 1, 4, 16) for _ in range(4))), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.skipif(
    not (find_spec("fla") and find_spec("triton")), reason="fla-core or triton is not installed (pip install 'slotlm[fla]')"
)
def test_the_kernels_equal_our_own_form_under_tritons_interpreter() -> None:
    """In a process of its own, since Triton reads once whether it interprets."""
    done = subprocess.run([sys.executable, "-m", "tests.ops.interpreted"], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(":") >= 13, done.stdout
