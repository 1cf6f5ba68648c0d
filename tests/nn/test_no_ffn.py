"""Layers without a feed-forward."""

from typing import Any

import pytest
import torch

from lm.nn.context import Context
from lm.nn.transformer import build_model
from tests.nn.models import MAMBA2, config, redrawn

ALONE: dict[str, Any] = {
    "ffn": {"kind": "none"}, "recurrent": MAMBA2, "pattern": ["recurrent"], "position": {"kind": "none"},
}  # fmt: skip


@torch.no_grad()
def test_a_layer_adds_its_mixer_and_nothing_else() -> None:
    model = redrawn(config(**ALONE))
    block, x = model.blocks[1], torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    ctx = Context.alone(x)
    mixer, residual = block.get_submodule("recurrent"), block.get_submodule("recurrent_residual")
    assert torch.equal(block(x, ctx), x + mixer(residual.norm(x), ctx))
    assert not [name for name, _ in model.named_parameters() if "ffn" in name]


@pytest.mark.parametrize(("changes", "additions"), [({}, 6), (ALONE, 3), ({"ffn": {"kind": "none"}}, 3)], ids=["both", "state", "heads"])
def test_what_writes_to_the_residual_is_scaled_by_how_often_that_is_done(changes: dict[str, Any], additions: int) -> None:
    model = build_model(config(**{"d_model": 64, "init": {"std": 0.02}} | changes), seed=0)
    [out] = [p.detach() for name, p in model.named_parameters() if name.startswith("blocks.1") and name.endswith(".o.weight")]
    assert out.std().item() == pytest.approx(0.02 / additions**0.5, rel=0.1)
