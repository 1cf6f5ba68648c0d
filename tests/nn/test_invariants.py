"""What must hold for every combination of slots, in float64."""

import itertools
from typing import Any

import pytest
import torch

from lm.nn.context import Context
from lm.nn.mixers.base import Attention
from lm.nn.mixers.grouped import GQA
from lm.nn.model_config import model_config
from lm.schema import Tree
from lm.testing.invariants import check_model, check_positions, check_rows_of_the_cache
from lm.testing.models import BASE
from tests.nn.grid import (
    COMBINATIONS,
    NAMES,
    PAIRWISE,
    PART,
    PARTS,
    SLOTS,
    Choice,
    covering,
    may_meet,
    others,
    pairwise,
    parts,
    refused,
    some,
    trees,
)  # fmt: skip
from tests.nn.models import CONV, MIXTURES, with_kinds


def hold(tree: Tree) -> None:
    """Every check of this kind of stack."""
    try:
        check_model(model_config(tree))
    except AssertionError as error:
        raise AssertionError(f"{ {name: tree.get(name) for name in ('kind', *NAMES)} }: {error}") from error


def hold_all(start: int, models: list[tuple[str, Choice]]) -> None:
    for tree in trees(start, models):
        hold(tree)


@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
@torch.no_grad()
def test_the_invariants_hold_for_some_random_models(kind: str) -> None:
    for tree in some(kind, 8):
        hold(tree)


@pytest.mark.slow
@pytest.mark.parametrize("start", PARTS)
@torch.no_grad()
def test_the_invariants_hold_for_every_pair_of_slot_values(start: int) -> None:
    hold_all(start, pairwise())


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, sum(COMBINATIONS.values()) - PAIRWISE, PART))
@torch.no_grad()
def test_the_invariants_hold_for_triples_too(start: int) -> None:
    hold_all(start, others())


NO_ATTENTION: Tree = {"recurrent": CONV, "pattern": ["recurrent"], "embed": {"segments": 3}}


@pytest.mark.parametrize("position", ["none", "learned", "sinusoidal"])
@pytest.mark.parametrize("changes", [{}, {"block": {"kind": "parallel"}}, {"ffn": MIXTURES[0]}, {"kind": "encoder_decoder"}])
@torch.no_grad()
def test_the_invariants_hold_where_no_layer_attends(position: str, changes: Tree) -> None:
    """check_rows_of_the_cache was seen to fail: of rows that had changed places, the segments had not."""
    tree = with_kinds(BASE | {"kind": "decoder", "position": {"kind": position}} | NO_ATTENTION | changes)
    hold(tree)
    check_rows_of_the_cache(model_config(tree))


def without_rotation(self: GQA, x: torch.Tensor, ctx: Context) -> tuple[torch.Tensor, ...]:
    return self.queries(x), *self.keys_values(x)


@pytest.mark.parametrize(
    ("owner", "name", "does", "said"),
    [(Attention, "bias", lambda self, mask, position: None, "position=alibi"), (GQA, "projected", without_rotation, "position=rope")],
)
def test_an_attention_that_does_not_heed_a_position_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, does: Any, said: str
) -> None:
    cfg = model_config(BASE)
    check_positions(cfg)
    monkeypatch.setattr(owner, name, does)
    check_model(cfg)  # which holds without positions too
    with pytest.raises(AssertionError, match=f"{said} changes nothing"):
        check_positions(cfg)


@pytest.mark.slow
def test_every_pair_of_slot_values_that_may_meet_does() -> None:
    sizes = [len(values) for values in SLOTS.values()]
    everything: set[Any] = set()
    for kind, n in COMBINATIONS.items():
        chosen = covering(kind)
        assert len(chosen) == len(set(chosen)) == n
        met = {pair for choice in chosen for pair in parts(choice, 2)}
        pairs = itertools.combinations([[(slot, value) for value in range(size)] for slot, size in enumerate(sizes)], 2)
        assert met == {pair for a, b in pairs for pair in itertools.product(a, b) if may_meet(kind, pair)}
        everything |= met
    assert {pair for _, choice in pairwise() for pair in parts(choice, 2)} == everything
    assert len(pairwise()) == PAIRWISE
    assert not set(pairwise()) & set(others()) and len(pairwise()) + len(others()) == sum(COMBINATIONS.values())


def named(part: Any) -> set[str]:
    return {NAMES[slot] for slot, _ in part}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "single", "pairs"), [("decoder", 0, 135), ("encoder", 17, 101), ("encoder_decoder", 10, 79)])
def test_few_slot_values_may_not_meet(kind: str, single: int, pairs: int) -> None:
    """A parallel block with a norm that is not in front, or without a feed-forward; MLA with positions that are neither rotations nor
    none; norms behind a rotation, without one; an indexer with positions that bias scores; longrope with another number of pairs than
    factors; values of a first layer that does not attend; keys of an earlier layer where there is none; in an encoder-decoder neither
    parallel blocks nor MLA nor differences at all, nor layers of one sublayer, with a gain or with vectors of their own; in an encoder
    nothing recurrent; several residual streams with a norm of their sum, a parallel block or vectors of layers; layers of one sublayer
    without a feed-forward, or with another block than their own; vectors of layers in other blocks than sequential ones; norms of its
    own in a feed-forward where none is in front. A mixing with attention and positions of its own meets no others."""
    found = refused(kind)
    assert [sum(len(part) == size for part in found) for size in (1, 2)] == [single, pairs]
    may_not = (
        {"norm", "block"},
        {"ffn", "block"},
        {"norm", "residual"},
        {"block", "residual"},
        {"position", "attention"},
        {"position", "mixing"},
        {"attention", "mixing"},
        {"ffn", "mixing"},
        {"block", "mixing"},
        {"block", "embed"},
        {"norm", "ffn"},
        {"embed", "mixing"},
        {"embed", "residual"},
    )
    assert all(named(part) in may_not for part in found if len(part) == 2)
