"""What must hold for every combination of slots, in float64."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.nn.batch import Batch
from lm.nn.transformer import LM, EncoderDecoderLM, model_config
from lm.schema import Tree
from tests.doubles import Doubles, same
from tests.nn.grid import COMBINATIONS, NAMES, SLOTS, Choice, covering, may_meet, others, pairwise, parts, refused, tree_of
from tests.nn.models import BASE, CONV, MIXTURES, VOCAB, redrawn_any, tokens, with_kinds

S, M = 21, 13  # tokens, and tokens of a source
CHUNKS = [11, 1, 1, 6, 1, 1]
DOCUMENTS, SOURCES = [9, 5, 7], [4, 6, 3]
PART = 20  # combinations of one test

Check = Callable[[LM], None]


def a_batch(model: LM, b: int = 2) -> Batch:
    """Random tokens, with segments and a source where the model reads them."""
    segments = None
    if model.segment is not None:
        segments = torch.randint(0, model.segment.num_embeddings, (b, S), generator=torch.Generator().manual_seed(1))
    source = tokens(b, M, 51) if isinstance(model, EncoderDecoderLM) else None
    return Batch(tokens(b, S), segments=segments, source_tokens=source)


def columns(batch: Batch, start: int, stop: int, source: slice | None = slice(None)) -> Batch:
    """Some tokens of each row and some of its source, as a batch of their own without positions."""
    given = {name: value[:, start:stop] for name in ("tokens", "segments") if (value := getattr(batch, name)) is not None}
    if batch.source_tokens is not None and source is not None:
        given["source_tokens"] = batch.source_tokens[:, source]
    return Batch(**given)


def packing(batch: Batch) -> Batch:
    """The same tokens as three documents a row, each with a source of its own."""
    b = len(batch.tokens)
    out = replace(batch, positions=restarting(DOCUMENTS, b), documents=numbered(DOCUMENTS, b))
    if batch.source_tokens is not None:
        out = replace(out, source_positions=restarting(SOURCES, b), source_documents=numbered(SOURCES, b))
    return out


def restarting(lengths: list[int], b: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths]).expand(b, -1)


def numbered(lengths: list[int], b: int) -> Tensor:
    return torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)]).expand(b, -1)


def padding(batch: Batch, left: int, right: int) -> Batch:
    """`left` columns of padding before the tokens and `right` after them; the source gets them the other way round."""
    out = replace(batch, tokens=padded(batch.tokens, left, right, 3), positions=padded(restarting([S], 2), left, right, -1))
    if batch.segments is not None:
        out = replace(out, segments=padded(batch.segments, left, right, 0))
    if batch.source_tokens is not None:
        source, positions = padded(batch.source_tokens, right, left, 3), padded(restarting([M], 2), right, left, -1)
        out = replace(out, source_tokens=source, source_positions=positions)
    return out


def padded(x: Tensor, left: int, right: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(x, (left, right), value=fill)


def changed(ids: Tensor, at: int) -> Tensor:
    out = ids.clone()
    out[:, at] = (out[:, at] + 1) % VOCAB
    return out


def starts(lengths: list[int]) -> list[tuple[int, int]]:
    """Where each document starts and stops."""
    stops = list(itertools.accumulate(lengths))
    return list(zip([0, *stops], stops, strict=False))


def cached_equals_full(model: LM) -> None:
    batch = a_batch(model)
    full, cache = model(batch), model.new_cache(2, S, slack=4)
    assert full.std() >= 1, "blind: logits too small"
    stops = list(itertools.accumulate(CHUNKS))
    spans = zip([0, *stops], stops, strict=False)
    out = [model(columns(batch, start, stop, slice(None) if start == 0 else None), cache=cache) for start, stop in spans]
    same(torch.cat(out, 1), full, "cached and full")


def no_token_sees_the_future(model: LM) -> None:
    batch = a_batch(model)
    full, after = model(batch), model(replace(batch, tokens=changed(batch.tokens, 14)))
    same(after[:, :14], full[:, :14], "causality")
    assert (after[:, 14] - full[:, 14]).abs().max() > 1e-3, "a token does not matter to itself"


def tokens_see_both_sides(model: LM) -> None:
    batch = a_batch(model)
    moved = (model(batch) - model(replace(batch, tokens=changed(batch.tokens, 10)))).abs().amax((0, 2)) > 1e-4
    assert moved[9] and moved[10] and moved[11], "a neighbour is not seen"


def every_token_reads_the_source(model: LM) -> None:
    batch = a_batch(model)
    assert batch.source_tokens is not None
    moved = (model(batch) - model(replace(batch, source_tokens=changed(batch.source_tokens, 5)))).abs().amax((0, 2)) > 1e-4
    assert moved.all(), "a source is not read"


def packed_equals_separate(model: LM) -> None:
    batch = a_batch(model)
    together = model(packing(batch))
    for (start, stop), source in zip(starts(DOCUMENTS), starts(SOURCES), strict=True):
        same(together[:, start:stop], model(columns(batch, start, stop, slice(*source))), "packed and separate")


def padding_changes_nothing(model: LM) -> None:
    batch = a_batch(model)
    alone, out = model(batch), model(padding(batch, 4, 3))
    same(out[:, 4 : 4 + S], alone, "padding")
    assert out.isfinite().all(), "padding gives numbers that are not finite"


def gradient_reaches_every_parameter(model: LM) -> None:
    with torch.enable_grad():
        model(a_batch(model, b=4)).square().sum().backward()
    wanting = [name for name, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.abs().sum() > 0)]
    assert not wanting, f"no gradient: {wanting}"


CHECKS: dict[str, list[Check]] = {
    "decoder": [cached_equals_full, no_token_sees_the_future],
    "encoder": [tokens_see_both_sides],
    "encoder_decoder": [cached_equals_full, no_token_sees_the_future, every_token_reads_the_source],
}
ALWAYS: list[Check] = [packed_equals_separate, padding_changes_nothing]


def hold(tree: Tree) -> None:
    """Every check of this kind of stack."""
    cfg = model_config(tree)
    assert model_config(cfg.tree()) == cfg
    try:
        gradient_reaches_every_parameter(redrawn_any(cfg))
        with Doubles():
            model = redrawn_any(cfg).double()
            for check in [*CHECKS[tree["kind"]], *ALWAYS]:
                check(model)
    except AssertionError as error:
        raise AssertionError(f"{ {name: tree.get(name) for name in ('kind', *NAMES)} }: {error}") from error


def hold_all(models: list[tuple[str, Choice]], start: int) -> None:
    for kind, choice in models[start : start + PART]:
        hold(tree_of(kind, tuple(enumerate(choice))))


@pytest.mark.parametrize("start", range(0, len(pairwise()), PART))
@torch.no_grad()
def test_the_invariants_hold_for_every_pair_of_slot_values(start: int) -> None:
    hold_all(pairwise(), start)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(others()), PART))
@torch.no_grad()
def test_the_invariants_hold_for_triples_too(start: int) -> None:
    hold_all(others(), start)


NO_ATTENTION: Tree = {"recurrent": CONV, "pattern": ["recurrent"], "embed": {"segments": 3}}


@pytest.mark.parametrize("position", ["none", "learned", "sinusoidal"])
@pytest.mark.parametrize("changes", [{}, {"block": {"kind": "parallel"}}, {"ffn": MIXTURES[0]}, {"kind": "encoder_decoder"}])
@torch.no_grad()
def test_the_invariants_hold_where_no_layer_attends(position: str, changes: Tree) -> None:
    hold(with_kinds(BASE | {"kind": "decoder", "position": {"kind": position}} | NO_ATTENTION | changes))


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
    assert not set(pairwise()) & set(others()) and len(pairwise()) + len(others()) == sum(COMBINATIONS.values())


def named(part: Any) -> set[str]:
    return {NAMES[slot] for slot, _ in part}


@pytest.mark.parametrize(("kind", "single", "pairs"), [("decoder", 0, 21), ("encoder", 2, 21), ("encoder_decoder", 4, 1)])
def test_few_slot_values_may_not_meet(kind: str, single: int, pairs: int) -> None:
    """A parallel block with a norm that is not in front; MLA without rotation; longrope with another number of pairs than factors;
    in an encoder-decoder neither parallel blocks nor MLA at all; in an encoder nothing recurrent."""
    found = refused(kind)
    assert [sum(len(part) == size for part in found) for size in (1, 2)] == [single, pairs]
    assert all(named(part) in ({"norm", "block"}, {"position", "attention"}) for part in found if len(part) == 2)
