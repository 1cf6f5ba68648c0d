"""What a step of decoding leaves out changes nothing: looking for padding that is not there, and looking at every logit."""

import copy
from typing import Any

import pytest
import torch

from lm.errors import NumericsError
from lm.generation.config import SamplingConfig
from lm.generation.loop import finite
from lm.generation.weights.fused import QuickRope
from lm.generation.weights.prepare import prepare
from lm.nn.batch import Batch
from lm.nn.head import last_position
from lm.nn.position.rope import Rope
from lm.testing.models import Doubles, same, tokens
from tests.generation.drawing import generate
from tests.nn.models import ATTENTIONS, MIXING, MLA, POSITIONS, config, redrawn

ALL = [*({"attention": each} for each in ATTENTIONS), *({"position": each} for each in POSITIONS), *MIXING]
ROPES = [position for position in POSITIONS if position["kind"] == "rope"]
NEIGHBOURS = [ATTENTIONS[1], ATTENTIONS[2] | {"head_dim": 8}, ATTENTIONS[4] | {"value_residual": False}]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [40, 41], [60, 2, 5, 5, 1]]


@pytest.mark.parametrize("changes", ALL, ids=str)
def test_rows_without_padding_need_not_look_for_it(changes: dict[str, Any]) -> None:
    """A chunk longer than the slack, a few tokens, one token; then as many are forgotten, and read again."""
    model = redrawn(config(**changes)).double()
    ids, found = tokens(2, 20), []
    with Doubles(), torch.no_grad():
        for padded in (True, False):
            cache, out = model.new_cache(2, 20), []
            for start, stop in ((0, 14), (14, 17), (17, 18), (18, 19), (15, 19)):
                if start < cache.length:
                    cache.rewind(cache.length - start)
                positions = torch.arange(start, stop).expand(2, -1)
                out.append(model(Batch(ids[:, start:stop], positions=positions, padded=padded), cache=cache))
            found.append(torch.cat(out, dim=1))
        same(*found)
        same(found[0][:, :19], model(Batch(ids[:, :19])))


@pytest.mark.parametrize("form", [None, pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("changes", ALL, ids=str)
def test_no_forward_of_decoding_waits_for_the_device(changes: dict[str, Any], form: str | None) -> None:
    """As tests/training/test_meta.py, of rows without padding, caches in fewer bits, and rows that forget unlike numbers of tokens."""
    model = redrawn(config(**changes)).to("meta")
    model.cache_form = form
    cache, seen = model.new_cache(2, 20), 0
    with torch.no_grad():
        for width, padded in ((14, True), (3, False), (1, False), (1, False)):
            positions = torch.arange(seen, seen + width, device="meta").expand(2, -1)
            logits = model(Batch(tokens(2, width).to("meta"), positions=positions, padded=padded), read=last_position, cache=cache)
            assert logits.shape == (2, 61)
            seen += width
        cache.rewind(2)
        cache.rewind([1, 0])


def test_padding_is_looked_for_where_rows_are_uneven() -> None:
    model, said = redrawn(config()), []
    model.register_forward_pre_hook(lambda _, args: said.append(args[0].padded))
    generate(model, PROMPTS, SamplingConfig(max_tokens=3))
    generate(model, PROMPTS[:1] * 2, SamplingConfig(max_tokens=3))
    assert said == [True, False, False] + [False] * 3


@pytest.mark.parametrize("position", ROPES, ids=str)
@pytest.mark.parametrize("attention", NEIGHBOURS, ids=str)
def test_neighbours_that_turn_as_one_number_are_halves_that_turn(attention: dict[str, Any], position: dict[str, Any]) -> None:
    """Packed rows without a cache; test_weights.py has those with one."""
    model = redrawn(config(attention=attention, position=position)).double()
    at = torch.tensor([[*range(7), *range(5)], [*range(12)]])
    batch = Batch(tokens(2, 12), positions=at, documents=torch.tensor([[0] * 7 + [1] * 5, [0] * 12]))
    with Doubles(), torch.no_grad():
        prepared = prepare(copy.deepcopy(model))
        assert type(prepared.position) is QuickRope
        same(prepared(batch), model(batch))


@pytest.mark.parametrize("attention", [MLA, ATTENTIONS[3], ATTENTIONS[4], {"n_heads": 4, "head_dim": 9}], ids=str)
def test_what_is_not_fused_rotates_as_it_did(attention: dict[str, Any]) -> None:
    fraction = 1.0 if attention.get("head_dim") is None else 8 / 9
    model = redrawn(config(attention=attention, position={"kind": "rope", "fraction": fraction})).double()
    with Doubles(), torch.no_grad():
        prepared = prepare(copy.deepcopy(model))
        assert type(prepared.position) is Rope
        same(prepared(Batch(tokens(2, 12))), model(Batch(tokens(2, 12))))


def test_logits_in_bfloat16_turn_as_rounded_ones_do() -> None:
    model = redrawn(config(attention=ATTENTIONS[2])).bfloat16()
    with torch.no_grad():
        found, expected = prepare(copy.deepcopy(model))(Batch(tokens(2, 12))), model(Batch(tokens(2, 12)))
        exact = model.float()(Batch(tokens(2, 12)))
    assert (found - exact).std() < 1.2 * (expected - exact).std() < 0.1 * exact.std()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_logit_that_is_not_finite_is_met_and_large_ones_are_let_through(bad: float) -> None:
    large = torch.full((2, 9), 3e38)
    assert finite(large) is large and finite(-large).shape == (2, 9)
    for value in (large, torch.zeros(2, 9)):
        value[1, 4] = bad
        with pytest.raises(NumericsError, match="NaN or infinity"):
            finite(value)
