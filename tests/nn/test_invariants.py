"""What must hold for every combination of slots. Tolerances: float32 sums in another order, logits of std >= 1."""

import math
from typing import Any

import pytest
import torch

from lm.config import from_tree
from lm.nn.batch import Batch
from lm.nn.head import last_position
from lm.nn.transformer import DecoderConfig, DecoderLM, build_model
from tests.nn.models import all_slot_trees, config, packed, redrawn, tokens

TREES = list(all_slot_trees())
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def decode_in_chunks(model: DecoderLM, ids: torch.Tensor, chunks: list[int], slack: int = 4) -> torch.Tensor:
    cache = model.new_cache(ids.shape[0], ids.shape[1], slack=slack)
    out, start = [], 0
    for n in chunks:
        positions = torch.arange(start, start + n).expand(ids.shape[0], n)
        out.append(model(Batch(ids[:, start : start + n], positions=positions), cache=cache))
        start += n
    return torch.cat(out, dim=1)


def check_combination(tree: dict[str, Any]) -> None:
    model = redrawn(from_tree(DecoderConfig, tree))
    ids = tokens(2, 21)
    full = model(Batch(ids))
    assert full.std() >= 1, "blind: logits too small"
    torch.testing.assert_close(decode_in_chunks(model, ids, [11, 1, 1, 6, 1, 1]), full, **CLOSE)

    changed = ids.clone()
    changed[:, 14] = (changed[:, 14] + 1) % 61
    after = model(Batch(changed))
    torch.testing.assert_close(after[:, :14], full[:, :14], **CLOSE)
    assert (after[:, 14] - full[:, 14]).abs().max() > 1e-3

    row = packed([9, 5, 7])
    together = model(row)
    for start, stop in ((0, 9), (9, 14), (14, 21)):
        torch.testing.assert_close(together[:, start:stop], model(Batch(row.tokens[:, start:stop])), **CLOSE)


def test_the_product_of_slots_is_as_large_as_it_should_be() -> None:
    assert len(TREES) == 5 * 5 * 6 * (6 + 2 * 2)


@pytest.mark.parametrize("part", range(10))
@torch.no_grad()
def test_cached_equals_full_packed_equals_separate_and_no_token_sees_the_future(part: int) -> None:
    for tree in TREES[part::10]:
        try:
            check_combination(tree)
        except AssertionError as error:
            raise AssertionError(f"{ {k: tree[k] for k in ('norm', 'position', 'attention', 'ffn', 'block')} }: {error}") from error


@pytest.mark.parametrize("part", range(2))
def test_gradient_reaches_every_parameter(part: int) -> None:
    for tree in TREES[part * 7 :: 29]:
        model = redrawn(from_tree(DecoderConfig, tree))
        model(Batch(tokens(2, 40))).square().sum().backward()
        silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        assert not silent, f"{tree}: {silent}"


@torch.no_grad()
def test_left_padding_changes_nothing() -> None:
    for attention in ({"n_heads": 4}, {"n_heads": 4, "window": 5}, {"n_heads": 4, "softcap": 5.0}):
        model = redrawn(config(attention=attention))
        ids = tokens(1, 12)
        alone = model(Batch(ids))
        padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), ids], dim=1)
        positions = torch.cat([torch.full((1, 5), -1), torch.arange(12)[None]], dim=1)
        out = model(Batch(padded, positions=positions))
        torch.testing.assert_close(out[:, 5:], alone, **CLOSE)
        assert out.isfinite().all()


@torch.no_grad()
def test_rewind_forgets_and_reorder_exchanges_rows() -> None:
    for attention in ({"n_heads": 4}, {"n_heads": 4, "window": 6}, {"n_heads": 4, "window": 6, "global_every": 2}):
        model = redrawn(config(attention=attention))
        ids, wrong = tokens(2, 20), tokens(2, 3, seed=9)
        full = model(Batch(ids))
        cache = model.new_cache(2, 40, slack=4)
        model(Batch(ids[:, :15], positions=torch.arange(15).expand(2, 15)), cache=cache)
        for t in range(3):
            model(Batch(wrong[:, t : t + 1], positions=torch.full((2, 1), 15 + t)), cache=cache)
        cache.rewind(3)
        assert cache.length == 15
        cache.reorder(torch.tensor([1, 0]))
        swapped = ids.flip(0)
        out = [model(Batch(swapped[:, t : t + 1], positions=torch.full((2, 1), t)), cache=cache) for t in range(15, 20)]
        torch.testing.assert_close(torch.cat(out, 1), full.flip(0)[:, 15:], **CLOSE)


@torch.no_grad()
def test_rewinding_a_ring_beyond_its_slack_is_refused() -> None:
    model = redrawn(config(attention={"n_heads": 4, "window": 6}))
    cache = model.new_cache(1, 40, slack=4)
    model(Batch(tokens(1, 20), positions=torch.arange(20)[None]), cache=cache)
    with pytest.raises(ValueError, match="cannot rewind 5 tokens"):
        cache.rewind(5)


def test_a_windowed_cache_does_not_grow_with_the_sequence() -> None:
    model = redrawn(config(attention={"n_heads": 4, "window": 6, "global_every": 3}))
    sizes = [store[0].shape[2] for store in model.new_cache(1, 1000, slack=4).stores]
    assert sizes == [10, 10, 1000]


def test_the_config_round_trips_through_json() -> None:
    for tree in TREES[::17]:
        cfg = from_tree(DecoderConfig, tree)
        assert from_tree(DecoderConfig, cfg.tree()) == cfg


@torch.no_grad()
def test_the_last_position_reader_equals_the_last_logits() -> None:
    model = redrawn(config())
    ids = tokens(2, 9)
    torch.testing.assert_close(model(Batch(ids), loss=last_position), model(Batch(ids))[:, -1])


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    short, long = build_model(config(n_layers=2), seed=3), build_model(config(n_layers=3), seed=3)
    other = build_model(config(n_layers=2), seed=4)
    a, b, c = (dict(m.named_parameters()) for m in (short, long, other))
    assert torch.equal(a["blocks.1.attention.q.weight"], b["blocks.1.attention.q.weight"])
    assert not torch.equal(a["blocks.1.attention.q.weight"], c["blocks.1.attention.q.weight"])
    assert not torch.equal(a["blocks.0.attention.q.weight"], a["blocks.1.attention.q.weight"])
    scale = float(a["blocks.0.ffn.down.weight"].detach().std() / a["blocks.0.ffn.up.weight"].detach().std())
    assert math.isclose(scale, 1 / math.sqrt(2 * 2), rel_tol=0.1)
    assert short.head.weight is short.embed.weight


def test_a_tied_embedding_starts_like_an_untied_one() -> None:
    tied, untied = (build_model(config(head={"tied": tied}, init={"fan_in": True}), seed=3) for tied in (True, False))
    assert torch.equal(tied.embed.weight, untied.embed.weight)
    assert float(tied.embed.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


@torch.no_grad()
def test_a_cache_continues_by_itself_and_refuses_what_it_cannot_hold() -> None:
    model = redrawn(config())
    ids = tokens(2, 12)
    cache = model.new_cache(2, 12)
    out = [model(Batch(ids[:, i:j]), cache=cache) for i, j in ((0, 7), (7, 8), (8, 12))]
    torch.testing.assert_close(torch.cat(out, 1), model(Batch(ids)), **CLOSE)
    with pytest.raises(ValueError, match=r"the cache holds 12 tokens, and 12 \+ 1 are too many"):
        model(Batch(ids[:, :1]), cache=cache)
    with pytest.raises(ValueError, match="one document a row"):
        model(packed([3, 4]), cache=model.new_cache(1, 12))


@torch.no_grad()
def test_rewinding_a_ring_twice_counts_from_its_furthest_token() -> None:
    model = redrawn(config(attention={"n_heads": 4, "window": 6}))
    cache = model.new_cache(1, 40, slack=4)
    model(Batch(tokens(1, 20)), cache=cache)
    cache.rewind(3)
    with pytest.raises(ValueError, match="cannot rewind 2 tokens"):
        cache.rewind(2)
    cache.rewind(1)


@torch.no_grad()
def test_dropout_acts_in_training_only() -> None:
    model = redrawn(config(dropout=0.3, attention={"n_heads": 4, "dropout": 0.2}, ffn={"hidden": 40, "dropout": 0.2}))
    ids = tokens(1, 8)
    assert torch.equal(model(Batch(ids)), model(Batch(ids)))
    model.train()
    assert not torch.equal(model(Batch(ids)), model(Batch(ids)))


@torch.no_grad()
def test_a_window_of_w_sees_the_token_itself_and_w_minus_1_before_it() -> None:
    model = redrawn(config(n_layers=1, attention={"n_heads": 4, "window": 4}))
    ids = tokens(1, 16)
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 61
    moved = (model(Batch(ids)) - model(Batch(changed)))[0].abs().amax(-1) > 1e-4
    assert moved.nonzero().flatten().tolist() == [5, 6, 7, 8]


def test_every_nth_layer_is_global() -> None:
    attention = config(attention={"n_heads": 4, "window": 4, "global_every": 3}).attention
    assert [attention.layer_window(layer) for layer in range(7)] == [4, 4, None, 4, 4, None, 4]
