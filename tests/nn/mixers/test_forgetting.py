"""Attention that forgets: its scores against sums that are written out, alone, packed, in windows, from a cache, and in both directions."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.mixers.forgetting import ForgettingGQA
from lm.nn.mixers.gqa import GQAConfig
from lm.nn.model_config import model_config
from lm.nn.norm import RMSNormConfig
from lm.nn.position.bias import Alibi
from lm.ops.attention.mask import Mask, arange_positions
from lm.ops.cache.cache import numbers
from lm.ops.recompute import Recompute
from lm.testing.invariants import check_model, check_rows_of_the_cache
from lm.testing.models import BASE, redraw, same, tokens
from tests.nn.models import config, redrawn

pytestmark = pytest.mark.usefixtures("doubles")

D, S, DOCUMENTS = 24, 11, [4, 5, 2]
CPU = torch.device("cpu")


def by_hand(layer: ForgettingGQA, x: Tensor, seen: Any, slopes: Tensor | None = None) -> Tensor:
    """Score by score.  seen(i, j): whether token i sees token j.  Eqs. 5 and 6 of the paper."""
    q, (k, v) = layer.queries(x), layer.keys_values(x)
    h, groups = q.shape[1], q.shape[1] // k.shape[1]
    gates = torch.log(torch.sigmoid(F.linear(x, layer.forget.weight, layer.forget.bias)))  # (b, s, h)
    rows = []
    for i in range(x.shape[1]):
        scores = []
        for j in range(x.shape[1]):
            between = gates[:, min(i, j) + 1 : max(i, j) + 1].sum(1)  # (b, h)
            score = torch.stack([(q[:, n, i] * k[:, n // groups, j]).sum(-1) for n in range(h)], 1) * layer.head_dim**-0.5 + between
            score = score if slopes is None else score - slopes * abs(i - j)
            scores.append(score if seen(i, j) else torch.full_like(score, float("-inf")))
        weights = torch.stack(scores, -1).softmax(-1)  # (b, h, k)
        rows.append(torch.stack([(weights[:, n, :, None] * v[:, n // groups]).sum(1) for n in range(h)], 1))
    return layer.joined(torch.stack(rows, 2))


def a_layer(**fields: Any) -> ForgettingGQA:
    layer = GQAConfig(n_heads=4, head_dim=6, forget=True, **fields).build(RMSNormConfig(), D, 0)
    assert isinstance(layer, ForgettingGQA)
    redraw(layer)
    return layer


def inputs() -> Tensor:
    return torch.randn(2, S, D, generator=torch.Generator().manual_seed(3), requires_grad=True)


def starts(i: int) -> int:
    """Document of a token."""
    return sum(i >= stop for stop in (DOCUMENTS[0], DOCUMENTS[0] + DOCUMENTS[1]))


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "alone": ({}, lambda i, j: j <= i),
    "grouped, in a window": ({"n_kv_heads": 2, "window": 4}, lambda i, j: 0 <= i - j < 4),
    "in chunks": ({"n_kv_heads": 1, "window": 4, "chunked": True}, lambda i, j: j <= i and j // 4 == i // 4),
    "packed": ({"n_kv_heads": 2}, lambda i, j: j <= i and starts(i) == starts(j)),
    "in both directions": ({"n_kv_heads": 2}, lambda i, j: True),
    "behind a prefix": ({}, lambda i, j: j <= i or j < 5),
    "with slopes": ({"n_kv_heads": 2}, lambda i, j: j <= i),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_fade_by_the_gates_between_two_tokens(case: str) -> None:
    """Values, and the gradients of the input and of all weights."""
    fields, seen = CASES[case]
    layer, x, at = a_layer(**fields), inputs(), arange_positions(S, CPU)
    mask = Mask(at, at, causal=case != "in both directions", square=True)
    if case == "packed":
        places = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
        numbered = torch.cat([torch.full((n,), i) for i, n in enumerate(DOCUMENTS)])[None]
        mask = Mask(places, places, numbered, numbered)
    if case == "behind a prefix":
        mask = Mask(at, at, square=True, k_prefix=at < 5)
    position = Alibi(4) if case == "with slopes" else Context.alone(x).position
    slopes = position.slopes.double() if isinstance(position, Alibi) else None
    found, expected = layer(x, Context(position, mask)), by_hand(layer, x, seen, slopes)
    same(found, expected)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(5))
    wanted = [x, *layer.parameters()]
    for fast, plain in zip(*(torch.autograd.grad((out * weight).sum(), wanted) for out in (found, expected)), strict=True):
        assert plain.abs().max() > 0
        same(fast, plain)


@pytest.mark.parametrize("kind", ["none", "rope", "alibi"])
@pytest.mark.parametrize("attention", [{}, {"n_kv_heads": 1, "window": 5, "global_every": 2}, {"softcap": 5.0, "gpt_oss_sinks": True}])
def test_what_holds_of_all_models_holds(attention: dict[str, Any], kind: str) -> None:
    cfg = config(attention={"n_heads": 4, "forget": True} | attention, position={"kind": kind})
    check_model(cfg)
    check_rows_of_the_cache(cfg)


@torch.no_grad()
@pytest.mark.parametrize("position", [{"kind": "none"}, {"kind": "rope"}])
def test_a_forgotten_token_is_not_read(position: dict[str, Any]) -> None:
    """Where one gate closes, nothing before it matters; where all are open, nothing is forgotten."""
    model = redrawn(config(attention={"n_heads": 4, "forget": True}, position=position, n_layers=1))
    plain = redrawn(config(attention={"n_heads": 4}, position=position, n_layers=1))
    plain.load_state_dict({name: p for name, p in model.state_dict().items() if ".forget." not in name})
    ids, gates = tokens(1, 9), model.blocks[0].get_submodule("attention.forget")
    gates.weight.zero_()
    gates.bias.fill_(60.0)
    same(model(ids), plain(ids))
    gates.bias.fill_(-60.0)
    torch.testing.assert_close(model(ids), plain(Batch(ids, positions=torch.arange(9)[None], documents=torch.arange(9)[None])))


def test_a_cache_keeps_a_number_of_each_head_beside_keys_and_values() -> None:
    cfg = GQAConfig(n_heads=4, n_kv_heads=2, head_dim=6, forget=True)
    assert numbers([cfg.states(D, 0)])[0] == 2 * 2 * 6 + 4
    assert numbers([cfg.replace(forget=False).states(D, 0)])[0] == 2 * 2 * 6


@torch.no_grad()
def test_a_long_row_in_bf16_forgets_as_in_float32() -> None:
    """With gates of which a row of 600 sums up to some hundreds, where bf16 has whole numbers only."""
    model = redrawn(config(attention={"n_heads": 4, "forget": True}, position={"kind": "none"}, n_layers=1, max_seq_len=640)).float()
    ids, narrow = tokens(1, 600), redrawn(model.cfg).bfloat16()
    full, cache = model(ids), narrow.new_cache(1, 640)
    narrow(ids[:, :590], cache=cache)
    stepped = torch.cat([narrow(ids[:, i : i + 1], cache=cache) for i in range(590, 600)], 1)
    error = (stepped.float() - full[:, 590:]).abs().max() / full.std()
    assert error < 0.1 and (narrow(ids)[:, 590:].float() - full[:, 590:]).abs().max() / full.std() < 0.1


@pytest.mark.parametrize("how", [Recompute("block"), Recompute("selective")], ids=str)
def test_blocks_that_are_run_again_for_the_backward_give_the_same_gradients(how: Recompute) -> None:
    model, ids = redrawn(config(attention={"n_heads": 4, "n_kv_heads": 2, "forget": True})).train(), tokens(2, 17)
    expected = torch.autograd.grad(model(Batch(ids)).square().sum(), [*model.parameters()])
    model.recomputes(how)
    found = torch.autograd.grad(model(Batch(ids)).square().sum(), [*model.parameters()])
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_rows_are_not_cut_over_ranks() -> None:
    cfg = model_config(BASE | {"attention": {"kind": "gqa", "n_heads": 4, "forget": True}})
    assert cfg.why_not_context_parallel(2) == (
        "model.attention.forget sums gates over whole rows, of which a rank has a part. Set it to false"
    )
    assert cfg.why_not_tensor_parallel(2) is None
