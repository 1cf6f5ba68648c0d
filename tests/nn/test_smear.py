"""Tokens mixed with the one before them, between embedding and blocks."""

import pytest
import torch
from torch import Tensor

from lm.cost.count import count
from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.hf.io.writing import family_for
from lm.nn.context import Context
from lm.nn.model_config import model_config
from lm.nn.position.base import Position
from lm.nn.smear import Smear
from lm.nn.transformer import build_model
from lm.ops.attention.mask import Mask
from lm.schema import Tree
from lm.testing.invariants import check_rows_of_the_cache, check_sizes
from lm.testing.models import BASE, redraw, tokens
from lm.training.optim.traits import Rates, traits_of
from tests.generation.drawing import generate
from tests.nn.models import CONV, SMEARED, config, packed, redrawn, with_kinds


def by_hand(smear: Smear, x: Tensor, starts: list[int]) -> Tensor:
    """Token by token; a document begins at each of `starts`.  x: (s, d)."""
    rows = []
    for t in range(len(x)):
        share = smear.scale / (1 + torch.exp(-(x[t, : smear.channels] @ smear.gate)))
        rows.append(x[t] if t in starts else x[t] + share * x[t - 1])
    return torch.stack(rows)


@pytest.mark.usefixtures("doubles")
@torch.no_grad()
def test_a_token_has_a_share_of_the_one_before_it_in_its_document() -> None:
    smear, x, batch = redrawn(config(**SMEARED)).smear, torch.randn(1, 21, 32), packed([9, 1, 11])
    assert isinstance(smear, Smear) and batch.positions is not None
    mask = Mask(batch.positions, batch.positions, batch.documents, batch.documents)
    out = smear(x, Context(Position(), mask))
    torch.testing.assert_close(out[0], by_hand(smear, x[0], [0, 9, 10]), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(smear(x, Context.alone(x))[0], by_hand(smear, x[0], [0]), atol=1e-12, rtol=1e-12)
    assert (out - x).abs().max() > 0.1


@torch.no_grad()
def test_it_stands_behind_the_norm_of_the_embedding_and_changes_nothing_at_first() -> None:
    cfg, ids = config(**SMEARED), tokens(2, 9)
    model, plain = build_model(cfg, seed=0), build_model(config(embed={"norm": True}), seed=0)
    torch.testing.assert_close(model(ids), plain(ids), atol=0, rtol=0)
    redraw(model)
    x = model.embed(ids)
    assert model.embed_norm is not None and model.smear is not None
    ctx = Context.alone(x, model.position)
    torch.testing.assert_close(model.embedded(x, ctx, None), model.smear(model.embed_norm(x), ctx), atol=0, rtol=0)


HYBRID: Tree = {"recurrent": CONV, "pattern": ["recurrent", "attention"]}
LOOP: Tree = {"residual": {"kind": "loop", "times": 2}}


@pytest.mark.parametrize("changes", [{}, HYBRID, LOOP, {"kind": "encoder_decoder"}], ids=["plain", "hybrid", "loop", "encoder-decoder"])
def test_a_cache_keeps_one_token_which_it_forgets_and_reorders(changes: Tree) -> None:
    cfg = model_config(with_kinds(BASE | SMEARED | changes))
    check_rows_of_the_cache(cfg)
    check_sizes(cfg)
    without = cfg.replace(embed={"norm": True})
    assert count(cfg, 16).cache_bytes_per_row - count(without, 16).cache_bytes_per_row == 2 * 32
    stacks = 2 if cfg.kind == "encoder_decoder" else 1
    assert count(cfg, 16).parameters - count(without, 16).parameters == stacks * 6
    assert count(cfg, 16).forward_flops_per_token - count(without, 16).forward_flops_per_token == stacks * 2 * (5 + 32)


def test_rows_that_are_generated_together_are_those_of_each_alone() -> None:
    """Prompts of unlike lengths stand side by side with padding, and the last token of each is its own."""
    model, cfg = redrawn(config(**SMEARED)), SamplingConfig(max_tokens=9, temperature=0)
    prompts = [[5, 6, 7, 8, 9, 10], [3], [40, 41, 2]]
    assert generate(model, prompts, cfg) == [generate(model, [prompt], cfg)[0] for prompt in prompts]


def test_adamw_trains_it_at_the_same_rate_at_any_width_without_decay() -> None:
    model = build_model(config(d_model=64, parametrization={"kind": "mup", "base_width": 16}, **SMEARED), seed=0)
    found = {name: traits for name, traits in traits_of(model).items() if name.startswith("smear.")}
    assert len(found) == 2 and all(each.rates == Rates(eps=1 / 4) and not each.matrix and not each.decays for each in found.values())
    layers = traits_of(model, layer_decay=0.5)
    assert layers["smear.gate"].factor == layers["embed.weight"].factor == 0.5**4


def test_rows_in_slices_are_refused() -> None:
    assert config(**SMEARED).why_not_context_parallel(2) == (
        "model.embed.smear reads the token before, maybe another rank's. Set model.embed.smear=null"
    )


def test_no_family_of_transformers_has_a_place_for_it() -> None:
    with pytest.raises(ConfigError, match=r"model\.embed\.smear must be null"):
        family_for(config(embed={"smear": {"channels": 5}}))
