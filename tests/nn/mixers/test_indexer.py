"""Attention to what an indexer chooses: choice and loss key by key, alone, packed, in windows, in both directions, and from a cache."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.losses.auxiliary import with_auxiliary
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.mixers.choosing import ChoosingGQA
from lm.nn.mixers.gqa import GQAConfig
from lm.nn.mixers.indexer import LOSS, IndexerConfig, owns, spaced
from lm.nn.mixers.mla import ChoosingMLA, MLAConfig
from lm.nn.norm import RMSNormConfig
from lm.nn.transformer import DecoderLM
from lm.ops.attention.mask import Mask, arange_positions
from lm.ops.cache.cache import numbers
from lm.ops.recompute import Recompute
from lm.testing.invariants import check_model, check_rows_of_the_cache
from lm.testing.models import redraw, same, tokens
from tests.nn.models import MLA, config, redrawn

pytestmark = pytest.mark.usefixtures("doubles")

D, S, DOCUMENTS = 24, 11, [4, 5, 2]
CPU = torch.device("cpu")
INDEXER: dict[str, Any] = {"n_heads": 3, "head_dim": 8, "top_k": 3, "loss": 0.7}


def starts(i: int) -> int:
    """Document of a token."""
    return sum(i >= stop for stop in (DOCUMENTS[0], DOCUMENTS[0] + DOCUMENTS[1]))


def by_hand(layer: ChoosingGQA, x: Tensor, seen: Any) -> tuple[Tensor, Tensor]:
    """What each token reads, key by key, and the loss of each row: equations 1 to 4 of the paper."""
    assert layer.indexer is not None
    cfg, own = layer.indexer.cfg, layer.indexer
    q, (k, v) = layer.queries(x), layer.keys_values(x)
    h, groups = q.shape[1], q.shape[1] // k.shape[1]
    small_q = F.linear(x, own.q.weight).view(*x.shape[:2], cfg.n_heads, cfg.head_dim)
    small_k = F.layer_norm(F.linear(x, own.k.weight), (cfg.head_dim,), own.k_norm.weight, own.k_norm.bias, 1e-6)
    share = F.linear(x, own.weights.weight) / (cfg.n_heads * cfg.head_dim) ** 0.5
    rows, losses = [], []
    for row in range(len(x)):
        read, apart = [], []
        for i in range(x.shape[1]):
            mine = [j for j in range(x.shape[1]) if seen(i, j)]
            score = {
                j: sum(share[row, i, n] * (small_q[row, i, n] @ small_k[row, j]).clamp_min(0) for n in range(cfg.n_heads)) for j in mine
            }
            chosen = sorted(mine, key=lambda j: (-score[j].item(), -j))[: cfg.top_k]
            weights = [
                torch.stack([q[row, n, i] @ k[row, n // groups, j] * layer.head_dim**-0.5 for j in chosen]).softmax(-1) for n in range(h)
            ]
            read.append(torch.stack([sum(w * v[row, n // groups, j] for w, j in zip(weights[n], chosen, strict=True)) for n in range(h)]))
            target = torch.stack(weights).mean(0).detach()
            chances = torch.stack([score[j] for j in chosen]).log_softmax(-1)
            apart.append((target * (target.log() - chances)).sum())
        rows.append(torch.stack(read, 1))
        losses.append(torch.stack(apart).mean())
    return layer.joined(torch.stack(rows)), cfg.loss * torch.stack(losses)


def a_layer(**fields: Any) -> ChoosingGQA:
    layer = GQAConfig(n_heads=4, head_dim=6, indexer=IndexerConfig(**INDEXER), **fields).build(RMSNormConfig(), D, 0)
    assert isinstance(layer, ChoosingGQA)
    redraw(layer)
    return layer


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "alone": ({}, lambda i, j: j <= i),
    "grouped, in a window": ({"n_kv_heads": 2, "window": 5}, lambda i, j: 0 <= i - j < 5),
    "packed": ({"n_kv_heads": 2}, lambda i, j: j <= i and starts(i) == starts(j)),
    "in both directions": ({"n_kv_heads": 1}, lambda i, j: True),
    "behind a prefix": ({}, lambda i, j: j <= i or j < 5),
}


@pytest.mark.parametrize("case", CASES)
def test_the_best_keys_are_read_and_the_indexer_learns_what_is_read_of_them(case: str) -> None:
    """Outputs and losses, and the gradients of both: the large attention's weights have none of the loss, nor has the input."""
    fields, seen = CASES[case]
    layer, at = a_layer(**fields).train(), arange_positions(S, CPU)
    x = torch.randn(2, S, D, generator=torch.Generator().manual_seed(3), requires_grad=True)
    mask = Mask(at, at, causal=case != "in both directions", square=True)
    if case == "packed":
        places = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
        numbered = torch.cat([torch.full((n,), i) for i, n in enumerate(DOCUMENTS)])[None]
        mask = Mask(places, places, numbered, numbered)
    if case == "behind a prefix":
        mask = Mask(at, at, square=True, k_prefix=at < 5)
    ctx = Context(Context.alone(x).position, mask)
    found = layer(x, ctx)
    ctx.collect(0)
    loss = ctx.reported.losses[LOSS]["", 0]
    expected, apart = by_hand(layer, x, seen)
    same(found, expected)
    same(loss, apart)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(5))
    small = {name: p for name, p in layer.named_parameters() if name.startswith("indexer.")}
    large = [x, *(p for name, p in layer.named_parameters() if name not in small)]
    for of_indexer, plain in zip(
        *(torch.autograd.grad(each.sum(), [*small.values()], retain_graph=True) for each in (loss, apart)), strict=True
    ):
        assert plain.abs().max() > 0
        same(of_indexer, plain)
    for fast, plain in zip(
        *(torch.autograd.grad((out * weight).sum() + loss.sum(), large, retain_graph=True) for out in (found, expected)), strict=True
    ):
        same(fast, plain)
    assert all(grad is None for grad in torch.autograd.grad(loss.sum(), large, allow_unused=True))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["none", "rope", "learned"])
@pytest.mark.parametrize("attention", [{"n_kv_heads": 1, "window": 7, "global_every": 2}, {"softcap": 5.0, "gpt_oss_sinks": True}, MLA])
def test_what_holds_of_all_models_holds(attention: dict[str, Any], kind: str) -> None:
    if attention is MLA and kind == "learned":
        return
    cfg = config(attention={"n_heads": 4, "indexer": INDEXER} | attention, position={"kind": kind})
    check_model(cfg)
    check_rows_of_the_cache(cfg)


@torch.no_grad()
@pytest.mark.parametrize("attention", [{"n_heads": 4, "n_kv_heads": 2}, MLA | {"q_rank": 10}], ids=["gqa", "mla"])
def test_where_no_key_is_left_out_it_is_plain_attention(attention: dict[str, Any]) -> None:
    model = redrawn(config(attention=attention | {"indexer": INDEXER | {"top_k": 9}}))
    plain = redrawn(config(attention=attention))
    plain.load_state_dict({name: p for name, p in model.state_dict().items() if ".indexer." not in name})
    ids = tokens(2, 12)
    same(model(ids[:, :9]), plain(ids[:, :9]))
    assert (model(ids) - plain(ids))[:, 9:].abs().max() > 1e-3
    same(model(ids)[:, :9], plain(ids)[:, :9])


def shared(every: int, first: int, n_layers: int = 5) -> DecoderLM:
    return redrawn(config(attention={"n_heads": 4, "indexer": INDEXER | {"every": every, "first": first}}, n_layers=n_layers))


@torch.no_grad()
@pytest.mark.parametrize("every, first, own", [(2, 1, [0, 2, 4]), (3, 2, [0, 1, 4]), (9, 1, [0])])
def test_layers_see_what_an_earlier_one_has_chosen(every: int, first: int, own: list[int]) -> None:
    model, chosen, ids = shared(every, first), {}, tokens(2, 13)
    assert [i for i, block in enumerate(model.blocks) if block.attention.indexer is not None] == own
    read = model(Batch(ids), read=lambda hidden, head, ctx: chosen.update(ctx.shared) or head(hidden))
    assert sorted(layer for _, layer in chosen) == own and all(shown.sum(-1).max() == 3 for [shown] in chosen.values())
    cache = model.new_cache(2, 20)
    stepped = [model(part, cache=cache) for part in (ids[:, :6], ids[:, 6:7], ids[:, 7:])]
    same(torch.cat(stepped, 1), read)
    per_token = numbers([model.cfg.attention.states(32, layer) for layer in range(5)])[0]
    assert per_token == 5 * 2 * 32 + len(own) * 8


@pytest.mark.parametrize("attention", [{"n_heads": 4, "indexer": INDEXER | {"every": 2}}, MLA | {"indexer": INDEXER}], ids=["gqa", "mla"])
@pytest.mark.parametrize("how", [Recompute("block"), Recompute("selective")], ids=str)
def test_blocks_that_are_run_again_for_the_backward_give_the_same_gradients(how: Recompute, attention: dict[str, Any]) -> None:
    model, ids = redrawn(config(attention=attention, n_layers=4)).train(), tokens(2, 17)

    def gradients() -> tuple[Tensor, ...]:
        out, aux = model(Batch(ids), read=with_auxiliary(lambda hidden, head, ctx: head(hidden), 1.0))
        return torch.autograd.grad(out.square().mean() + aux.losses[LOSS], [*model.parameters()])

    expected = gradients()
    model.recomputes(how)
    torch.testing.assert_close(gradients(), expected, atol=0, rtol=0)


def test_an_indexer_learns_in_training_alone_and_not_where_it_is_frozen() -> None:
    model, ids = redrawn(config(attention=MLA | {"indexer": INDEXER})), Batch(tokens(2, 9))

    def reported() -> dict[str, Any]:
        found: dict[str, Any] = model(ids, read=lambda hidden, head, ctx: ctx.reported.losses)
        return found

    assert reported() == {}
    assert len(model.train() and reported()[LOSS]) == len(model.blocks)
    with torch.no_grad():
        assert reported() == {}
    for name, p in model.named_parameters():
        p.requires_grad_(".indexer." not in name)
    assert reported() == {}


def test_padding_counts_in_no_loss_and_a_layer_without_an_indexer_reports_none() -> None:
    pattern: dict[str, Any] = {"recurrent": {"kind": "short_conv", "kernel": 3}, "pattern": ["attention", "recurrent"], "n_layers": 2}
    model, ids = redrawn(config(attention={"n_heads": 4, "indexer": INDEXER}, **pattern)).train(), tokens(2, 9)

    def losses(batch: Batch) -> dict[tuple[str, int], Tensor]:
        found: dict[tuple[str, int], Tensor] = model(batch, read=lambda hidden, head, ctx: ctx.reported.losses[LOSS])
        return found

    alone = losses(Batch(ids))
    assert [*alone] == [("", 0)]
    positions = torch.cat([torch.arange(9), torch.full((4,), -1)])[None].expand(2, -1)
    same(losses(Batch(F.pad(ids, (0, 4)), positions=positions))["", 0], alone["", 0])


def test_of_equal_keys_the_last_are_read() -> None:
    """Where all products are below zero, all scores are 0."""
    layer, x = a_layer().eval(), torch.randn(1, 9, D)
    layer.shares = True  # so that the choice is told
    assert layer.indexer is not None
    with torch.no_grad():
        layer.indexer.weights.weight.zero_()
        ctx = Context.alone(x)
        layer(x, ctx)
    [shown] = ctx.shared["chosen", 0]
    at = torch.arange(9)
    assert torch.equal(shown[0], (at[None] <= at[:, None]) & (at[:, None] - at[None] < 3))


def test_spacing_is_found_again() -> None:
    for every in range(1, 5):
        for first in range(1, 5):
            own = [owns(layer, every, first) for layer in range(9)]
            assert spaced(own) is not None and [owns(layer, *spaced(own)) for layer in range(9)] == own
    assert spaced([True, False, True, True, False]) is None and spaced([False, True]) is None


def test_what_a_choice_of_keys_costs() -> None:
    cfg = GQAConfig(n_heads=4, head_dim=6)
    chosen = cfg.replace(indexer=IndexerConfig(**INDEXER))
    assert cfg.flops(D, 0, 64) == 4 * 24 * 64 and chosen.flops(D, 0, 64) == 4 * 24 * 3 + 2 * 3 * 9 * 64
    latent = MLAConfig(n_heads=4, kv_rank=8, nope_dim=6, rope_dim=4, v_dim=5)
    assert latent.replace(indexer=IndexerConfig(**INDEXER)).flops(D, 0, 64) == 2 * 4 * 15 * 3 + 2 * 3 * 9 * 64
    for cfg in (chosen, latent.replace(indexer=IndexerConfig(**INDEXER))):
        assert str(cfg.why_not_context_parallel(2)).startswith("model.attention.indexer chooses among whole rows for all heads")
    assert isinstance(latent.replace(indexer=IndexerConfig(**INDEXER)).build(RMSNormConfig(), D, 0), ChoosingMLA)
