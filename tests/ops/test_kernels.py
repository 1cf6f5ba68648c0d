"""Recurrences by flash-linear-attention's kernels: equal to our own form under Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from lm.ops.recurrence import kernels
from lm.ops.recurrence.matrix import Flow


def test_documents_begin_where_their_number_changes_and_at_each_row() -> None:
    documents = torch.tensor([[0, 0, 1, 1], [1, 1, 1, -1]])
    assert kernels.bounds(documents).tolist() == [0, 2, 4, 7, 8]


def test_a_cpu_has_our_own_form() -> None:
    assert not kernels.serves(Flow(*(torch.zeros(1, 1, 4, 16) for _ in range(4))), torch.bfloat16)


@pytest.mark.parametrize(
    ("channels", "triton", "capability", "refused"),
    [
        *((1, triton, (9, 0), refused) for triton, refused in (("3.3.1", False), ("3.4.0", True), ("3.6.0", True), ("3.7.1", False))),
        (1, "3.6.0", (8, 0), False),
        (16, "3.6.0", (9, 0), False),
    ],
)
def test_gradients_of_one_decay_per_head_are_refused_on_hopper_by_some_versions_of_triton(
    channels: int, triton: str, capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The versions that fla-core 0.6 names, on a GPU that is not there."""
    kernels._wrong_on_hopper.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q, decay = torch.zeros(1, 1, 4, 16), torch.zeros(1, 1, 4, channels)
    assert kernels.refused(Flow(q, q, q, decay)) == refused
    kernels._wrong_on_hopper.cache_clear()


@pytest.mark.slow
@pytest.mark.skipif(
    not (find_spec("fla") and find_spec("triton")), reason="fla-core or triton is not installed (pip install 'slotlm[fla]')"
)
def test_the_kernels_equal_our_own_form_under_tritons_interpreter() -> None:
    """In a process of its own, since Triton reads once whether it interprets."""
    done = subprocess.run([sys.executable, "-m", "tests.ops.interpreted"], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(":") >= 13, done.stdout
