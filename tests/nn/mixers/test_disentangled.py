"""Attention to contents and distances: its scores against sums that are written out, alone, packed, in windows, from a cache."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm.errors import ConfigError
from lm.nn.context import Context
from lm.nn.mixers.disentangled import DisentangledGQA
from lm.nn.mixers.gqa import GQAConfig
from lm.nn.model_config import model_config
from lm.nn.norm import LayerNormConfig
from lm.ops.attention.mask import Mask, arange_positions
from lm.ops.distance import signed_buckets
from lm.testing.invariants import check_model, check_rows_of_the_cache
from lm.testing.models import BASE, redraw, same, tokens
from tests.nn.models import config, redrawn

D, S, DOCUMENTS = 24, 11, [4, 5, 2]
FAR: dict[str, Any] = {"n_buckets": 4, "max_distance": 8}
CPU = torch.device("cpu")


def by_hand(layer: DisentangledGQA, x: Tensor, seen: Any) -> Tensor:
    """Score by score, by eq. 4 of the paper.  seen(i, j): whether token i sees token j."""
    cfg, c = layer.distances, layer.head_dim
    q, (k, v) = layer.queries(x), layer.keys_values(x)
    h, groups = q.shape[1], q.shape[1] // k.shape[1]
    vectors = layer.table_norm(layer.table.weight)
    to_q = vectors @ (layer.q if layer.distance_q is None else layer.distance_q).weight.T
    to_k = vectors @ (layer.k if layer.distance_k is None else layer.distance_k).weight.T
    of_q, of_k = layer.q_norm(to_q.unflatten(-1, (-1, c))), layer.k_norm(to_k.unflatten(-1, (-1, c)))  # (n, h, c), (n, g, c)
    out = []
    for i in range(x.shape[1]):
        heads = []
        for n in range(h):
            scores = []
            for j in range(x.shape[1]):
                row = int(signed_buckets(torch.tensor(i - j), cfg.n_buckets, cfg.max_distance))
                score = (q[:, n, i] * k[:, n // groups, j]).sum(-1)
                score = score + ((q[:, n, i] * of_k[row, n // groups]).sum(-1) if cfg.terms != "key" else 0)
                score = score + ((k[:, n // groups, j] * of_q[row, n]).sum(-1) if cfg.terms != "query" else 0)
                scores.append(score * layer.how.scale if seen(i, j) else torch.full_like(score, float("-inf")))
            heads.append((torch.stack(scores, -1).softmax(-1)[..., None] * v[:, n // groups]).sum(1))
        out.append(torch.stack(heads, 1))
    return layer.joined(torch.stack(out, 2))


def a_layer(distances: dict[str, Any], **fields: Any) -> DisentangledGQA:
    layer = GQAConfig(n_heads=4, head_dim=6, disentangled=FAR | distances, **fields).build(LayerNormConfig(), D, 0)
    assert isinstance(layer, DisentangledGQA)
    redraw(layer)
    return layer


def starts(i: int) -> int:
    """Document of a token."""
    return sum(i >= stop for stop in (DOCUMENTS[0], DOCUMENTS[0] + DOCUMENTS[1]))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "in both directions": ({}, {}, lambda i, j: True),
    "causal, heads grouped": ({}, {"n_kv_heads": 2}, lambda i, j: j <= i),
    "in a window": ({"norm": False}, {"n_kv_heads": 1, "window": 4}, lambda i, j: 0 <= i - j < 4),
    "packed": ({"max_distance": None}, {"n_kv_heads": 2, "qk_norm": "head"}, lambda i, j: j <= i and starts(i) == starts(j)),
    "queries alone read distances": ({"terms": "query"}, {}, lambda i, j: True),
    "keys alone read them": ({"terms": "key"}, {"n_kv_heads": 2, "scale": 0.3}, lambda i, j: True),
    "matrices of their own": ({"projections": "own"}, {"n_kv_heads": 2, "qk_norm": "head"}, lambda i, j: True),
}


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("case", CASES)
def test_scores_have_the_terms_of_distances(case: str) -> None:
    """Values, and the gradients of the input and of all weights."""
    distances, fields, seen = CASES[case]
    layer, at = a_layer(distances, **fields), arange_positions(S, CPU)
    x = torch.randn(2, S, D, generator=torch.Generator().manual_seed(3), requires_grad=True)
    mask = Mask(at, at, causal=not seen(0, 1), square=True)
    if case == "packed":
        places = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
        numbered = torch.cat([torch.full((n,), i) for i, n in enumerate(DOCUMENTS)])[None]
        mask = Mask(places, places, numbered, numbered)
    found, expected = layer(x, Context(Context.alone(x).position, mask)), by_hand(layer, x, seen)
    same(found, expected)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(5))
    wanted = [x, *layer.parameters()]
    for fast, plain in zip(*(torch.autograd.grad((out * weight).sum(), wanted) for out in (found, expected)), strict=True):
        assert plain.abs().max() > 0
        same(fast, plain)


def test_rows_of_the_table_are_those_of_deberta() -> None:
    """Exact up to half the buckets and logarithmic behind, beyond the longest distance too; and exact for all."""
    theirs = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    distance = torch.arange(-1500, 1501)
    for n, most in ((256, 512), (4, 8), (32, 100), (7, 20)):
        expected = (theirs.make_log_bucket_position(distance, n, most).long() + n).clamp(0, 2 * n - 1)
        assert torch.equal(signed_buckets(distance, n, most), expected)
    assert signed_buckets(torch.tensor([-9, -4, -3, 0, 3, 4]), 4, None).tolist() == [0, 0, 1, 4, 7, 7]


def test_rows_are_the_same_where_bf16_is_the_default() -> None:
    """As with trainer.precision=bf16-true. Seen to fail: one distance in eight had another vector."""
    distance = torch.arange(-600, 601)
    expected = signed_buckets(distance, 256, 512)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(signed_buckets(distance, 256, 512), expected)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("kind", ["none", "learned"])
@pytest.mark.parametrize("attention", [{}, {"n_kv_heads": 1, "window": 5, "global_every": 2}, {"softcap": 5.0, "gpt_oss_sinks": True}])
def test_what_holds_of_all_models_holds(attention: dict[str, Any], kind: str) -> None:
    cfg = config(attention={"n_heads": 4, "disentangled": FAR} | attention, position={"kind": kind})
    check_model(cfg)
    check_rows_of_the_cache(cfg)


def test_the_first_layer_has_the_vectors_of_all() -> None:
    model = redrawn(config(attention={"n_heads": 4, "disentangled": FAR}, position={"kind": "none"}, n_layers=3))
    tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    assert tables == ["blocks.0.attention.table", "embed"]
    model(tokens(1, 9)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for name, p in model.named_parameters() if ".table" in name)


def test_ranks_share_neither_rows_nor_heads() -> None:
    cfg = model_config(BASE | {"attention": {"kind": "gqa", "n_heads": 4, "disentangled": {}}, "position": {"kind": "none"}})
    why = "model.attention.disentangled reads distances of whole rows for all heads, of which a rank has some. Set it to null"
    assert (cfg.why_not_context_parallel(2), cfg.why_not_tensor_parallel(2)) == (why, why)


def test_distances_that_share_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_distance=4 leaves nothing to share beyond the 4 distances that have a vector each"):
        config(attention={"n_heads": 4, "disentangled": {"n_buckets": 8, "max_distance": 4}}, position={"kind": "none"})
