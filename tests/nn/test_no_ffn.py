"""Layers without a feed-forward, and layers of one alone."""

from typing import Any

import pytest
import torch

from lm.nn.context import Context
from lm.nn.transformer import build_model
from tests.nn.models import MAMBA2, SINGLE, config, redrawn

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


@torch.no_grad()
@pytest.mark.parametrize(("layer", "slot"), [(0, "recurrent"), (1, "ffn"), (2, "attention")])
def test_a_layer_of_one_sublayer_adds_that_and_nothing_else(layer: int, slot: str) -> None:
    model = redrawn(config(block=SINGLE, recurrent=MAMBA2, pattern=["recurrent", "ffn", "attention"], position={"kind": "none"}))
    block, x = model.blocks[layer], torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    ctx = Context.alone(x)
    sublayer, residual = block.get_submodule(slot), block.get_submodule(f"{slot}_residual")
    assert torch.equal(block(x, ctx), x + sublayer(residual.norm(x), ctx))
    assert [name for name, _ in block.named_children()] == [slot, f"{slot}_residual"]


def test_a_cache_keeps_nothing_of_a_layer_of_a_feed_forward() -> None:
    model = redrawn(config(block=SINGLE, pattern=["attention", "ffn"]))
    cache = model.new_cache(1, 20)
    assert (sorted(cache.stores), sorted(cache.states)) == ([0, 2], [])


@pytest.mark.parametrize(
    ("changes", "additions"),
    [({}, 6), (ALONE, 3), ({"ffn": {"kind": "none"}}, 3), ({"block": SINGLE, "pattern": ["ffn", "attention"]}, 3)],
    ids=["both", "state", "heads", "single"],
)
def test_what_writes_to_the_residual_is_scaled_by_how_often_that_is_done(changes: dict[str, Any], additions: int) -> None:
    model = build_model(config(**{"d_model": 64, "init": {"std": 0.02}} | changes), seed=0)
    [out] = [p.detach() for name, p in model.named_parameters() if name.startswith("blocks.1") and name.endswith(".o.weight")]
    assert out.std().item() == pytest.approx(0.02 / additions**0.5, rel=0.1)
