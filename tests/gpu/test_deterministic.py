"""Steps on a GPU that are taken twice give the same weights, bit for bit."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lm.training.deterministic import deterministic
from tests.training.steps import ADAMW, MOE, batches, config, train_steps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LENGTH = 1024  # several blocks of keys for a query, whose gradients are added
GATED_DELTA = {
    "n_layers": 3,
    "pattern": ["recurrent", "attention"],
    "recurrent": {"kind": "gated_delta", "n_heads": 2, "k_dim": 16, "v_dim": 16},
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("model", "documents", "compiled"),
    [({}, False, False), ({}, False, True), ({}, True, False), (MOE, False, False), (GATED_DELTA, False, False)],
    ids=["plain", "compiled", "documents", "experts", "gated delta"],
)
def test_steps_repeat_to_the_bit(model: dict[str, Any], documents: bool, compiled: bool, precision: str) -> None:
    cfg, rows = config(ADAMW, LENGTH, model={"d_model": 256, **model}, n_heads=4), batches(LENGTH, documents=documents)
    with deterministic(True):
        first, again = (train_steps(cfg, rows, accelerator="cuda", compile=compiled, precision=precision) for _ in range(2))
    assert first[0] == again[0]
    assert all(torch.equal(weights, again[1][name]) for name, weights in first[1].items())
