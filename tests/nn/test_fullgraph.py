"""Whole models without a break of their graph, for users of torch.compile, torch.export and what builds on them."""

from typing import Any

import pytest
import torch

from lm.nn.batch import Batch
from lm.nn.model_config import model_config
from lm.nn.transformer import build_model
from lm.testing.models import BASE

SLOTS: dict[str, dict[str, Any]] = {
    "rope": {"norm": {"kind": "rms"}, "position": {"kind": "rope"}},
    "learned": {"norm": {"kind": "layer"}, "position": {"kind": "learned"}},
    "window": {"position": {"kind": "rope"}, "attention": {"kind": "gqa", "n_heads": 2, "window": 3}},
}


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_is_one_graph(slots: dict[str, Any], wrapped: bool) -> None:
    """Seen to fail for ids alone: a batch that the graph builds had a default of a class that a compiler cannot build."""
    torch._dynamo.reset()
    model, ids = build_model(model_config(BASE | slots), seed=0), torch.arange(18).view(3, 6)
    given = Batch(ids) if wrapped else ids
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(given), model(given)
    torch.testing.assert_close(found, wanted)
    weights = list(model.parameters())
    for ours, theirs in zip(torch.autograd.grad(found.sum(), weights), torch.autograd.grad(wanted.sum(), weights), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
