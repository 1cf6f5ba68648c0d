from collections.abc import Iterator

import pytest
import torch

from lm.testing.models import Doubles


@pytest.fixture
def doubles() -> Iterator[None]:
    """Everything of the test in float64: what it draws, what it builds, and what asks for float32 (but in a backward pass)."""
    torch.set_default_dtype(torch.float64)
    try:
        with Doubles():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
