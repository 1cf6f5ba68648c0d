"""Latent attention: what is cached, the absorbed form, and the paper's formulas by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.mixers.mla import MLA, MLAConfig
from lm.nn.position.base import Position
from lm.nn.position.scaling import frequencies
from lm.ops.attention.mask import Mask, arange_positions
from lm.ops.rotation import rope_angles, rotate_half
from lm.schema import from_tree
from lm.testing.models import redraw, tokens
from tests.nn.models import CLOSE, config, packed, redrawn
from tests.nn.models import MLA as TREE

pytestmark = pytest.mark.usefixtures("doubles")

KINDS: list[dict[str, Any]] = [
    TREE, TREE | {"q_rank": 12, "bias": True, "scale": 0.4}, TREE | {"query_growth": {"rate": 0.6, "every": 3, "first": 1}},
]  # fmt: skip


def layer(tree: dict[str, Any], d: int = 32) -> MLA:
    made = from_tree(MLAConfig, tree).build(config().norm, d, 0)
    assert isinstance(made, MLA)
    for p in made.parameters():
        p.data.zero_()
    redraw(made)
    return made


def turned(x: Tensor) -> Tensor:
    """The rows of (s, r), each rotated by its place."""
    return rotate_half(x[None, None], *rope_angles(torch.arange(len(x))[None], frequencies(x.shape[-1], 10000.0)))[0, 0]


def by_hand(mla: MLA, x: Tensor, turned: Callable[[Tensor], Tensor] = turned) -> Tensor:
    """Eqs. 37 to 47 of DeepSeek-V2, head by head.  x: (s, d)."""
    cfg, heads = mla.cfg, []
    q = mla.q(x) if cfg.q_rank is None else mla.q_up(mla.q_norm(mla.q_down(x)))
    down = mla.kv_down(x)
    latent, k_rope = mla.kv_norm(down[:, : cfg.kv_rank]), turned(down[:, cfg.kv_rank :])
    width = cfg.nope_dim + cfg.rope_dim
    if (growth := cfg.query_growth) is not None:
        q = q * torch.tensor([1 + growth.rate * math.log(1 + (place + growth.first) // growth.every) for place in range(len(x))])[:, None]
    for h in range(cfg.n_heads):
        mine = q[:, h * width : (h + 1) * width]
        k = latent @ mla.k_up.weight[h * cfg.nope_dim : (h + 1) * cfg.nope_dim].t()
        v = latent @ mla.v_up.weight[h * cfg.v_dim : (h + 1) * cfg.v_dim].t()
        scores = (mine[:, : cfg.nope_dim] @ k.t() + turned(mine[:, cfg.nope_dim :]) @ k_rope.t()) * (cfg.scale or 1 / math.sqrt(width))
        heads.append(scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf")).softmax(-1) @ v)
    out: Tensor = mla.o(torch.cat(heads, -1))
    return out


@pytest.mark.parametrize("tree", KINDS)
@torch.no_grad()
def test_latent_attention_equals_the_papers_equations(tree: dict[str, Any]) -> None:
    mla, x = layer(tree), torch.randn(7, 32)
    position = redrawn(config(attention=tree)).position
    at = arange_positions(7, x.device)
    out = mla(x[None], Context(position, Mask(at, at, square=True), position.angles(at)))[0]
    torch.testing.assert_close(out, by_hand(mla, x), **CLOSE)
    unrotated = mla(x[None], Context(Position(), Mask(at, at, square=True)))[0]
    assert (unrotated - out).abs().max() > 0.1


@pytest.mark.parametrize("tree", KINDS)
@torch.no_grad()
def test_without_positions_the_shared_key_is_as_it_is_projected(tree: dict[str, Any]) -> None:
    """Kimi Linear: Kimi Team 2025, arXiv:2510.26692, section 4."""
    mla, x = layer(tree), torch.randn(7, 32)
    at = arange_positions(7, x.device)
    out = mla(x[None], Context(redrawn(config(attention=tree, position={"kind": "none"})).position, Mask(at, at, square=True)))[0]
    torch.testing.assert_close(out, by_hand(mla, x, turned=lambda rows: rows), **CLOSE)


@pytest.mark.parametrize("position", [{"kind": "rope"}, {"kind": "none"}])
@pytest.mark.parametrize("tree", KINDS)
def test_the_absorbed_form_equals_the_expanded_one_in_values_and_gradients(tree: dict[str, Any], position: dict[str, Any]) -> None:
    model = redrawn(config(attention=tree, position=position))
    batch, results = Batch(tokens(2, 14)), []
    for cache in (None, model.new_cache(2, 14)):
        out = model(batch, cache=cache)
        results.append([out, *torch.autograd.grad(out.square().mean(), list(model.parameters()))])
    torch.testing.assert_close(results[1], results[0], **CLOSE)


@torch.no_grad()
def test_the_cache_holds_one_latent_and_one_rotated_key_a_token() -> None:
    model = redrawn(config(attention=TREE))
    cache = model.new_cache(2, 10)
    assert [tuple(store.shape) for store in cache.stores[0]] == [(2, 1, 10, TREE["kv_rank"]), (2, 1, 10, TREE["rope_dim"])]
    model(Batch(tokens(2, 4)), cache=cache)
    assert cache.stores[0][0][:, :, :4].abs().sum(-1).gt(0).all() and (cache.stores[0][0][:, :, 4:] == 0).all()


@torch.no_grad()
def test_latents_of_left_padding_are_not_seen_by_the_absorbed_form() -> None:
    model = redrawn(config(attention=KINDS[1]))
    ids = tokens(1, 9)
    positions = torch.cat([torch.full((1, 3), -1), torch.arange(9)[None]], dim=1)
    wide, cache = torch.cat([torch.full((1, 3), 7), ids], dim=1), model.new_cache(1, 12)
    pieces = [model(Batch(wide[:, i:j], positions=positions[:, i:j]), cache=cache) for i, j in ((0, 8), (8, 9), (9, 12))]
    torch.testing.assert_close(torch.cat(pieces, 1)[:, 3:], model(Batch(ids)), **CLOSE)


@torch.no_grad()
def test_packed_documents_have_latents_of_their_own() -> None:
    model, row = redrawn(config(attention=TREE)), packed([6, 8])
    torch.testing.assert_close(model(row)[:, 6:], model(Batch(row.tokens[:, 6:])), **CLOSE)
