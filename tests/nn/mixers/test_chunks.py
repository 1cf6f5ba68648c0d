"""Attention within chunks, and what else Llama 4 has."""

from typing import Any

import pytest
import torch

from lm.cost.count import count
from lm.nn.batch import Batch
from lm.nn.mixers.grouped import GQA
from lm.nn.transformer import build_model
from lm.testing.invariants import check_model, check_rows_of_the_cache, check_sizes
from lm.testing.models import same, tokens
from tests.nn.models import config, packed, redrawn

CHUNK = 5
CHUNKS: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "window": CHUNK, "chunked": True}
LLAMA4: dict[str, Any] = {
    "position": {"kind": "rope", "interleaved": True, "none_every": 2},
    "attention": CHUNKS | {"global_every": 2, "qk_norm": "l2", "query_growth": {"rate": 0.6, "every": 4, "first": 1, "unrotated": True}},
}


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("kind", ["none", "rope", "alibi"])
@torch.no_grad()
def test_a_row_in_chunks_is_as_many_rows(kind: str) -> None:
    """Positions that act by distances are the same in a chunk as in a row of its own."""
    model, ids = redrawn(config(attention=CHUNKS, position={"kind": kind})), tokens(2, 3 * CHUNK + 2)
    whole = redrawn(config(attention=CHUNKS | {"chunked": False, "window": None}, position={"kind": kind}))
    found = model(ids)
    same(found, torch.cat([whole(part) for part in ids.split(CHUNK, 1)], 1))
    assert (found - whole(ids))[:, CHUNK:].abs().max() > 0.1


@pytest.mark.usefixtures("doubles")
@torch.no_grad()
def test_chunks_of_packed_documents_begin_with_the_document() -> None:
    model, batch = redrawn(config(attention=CHUNKS)), packed([7, 8, 3])
    same(model(batch), torch.cat([model(part) for part in batch.tokens.split([7, 8, 3], 1)], 1))


def test_a_chunk_costs_what_a_window_does() -> None:
    both = [count(config(attention=CHUNKS | {"chunked": chunked}), 20) for chunked in (False, True)]
    assert both[0] == both[1]
    assert str(build_model(config(attention=CHUNKS), device="meta").blocks[0].attention).splitlines()[1].endswith("chunks of 5")


def test_norms_without_weights_and_queries_that_grow_hold_what_all_models_do() -> None:
    cfg = config(**LLAMA4)
    check_model(cfg)
    check_sizes(cfg)
    check_rows_of_the_cache(cfg)


@pytest.mark.usefixtures("doubles")
@torch.no_grad()
def test_layers_that_rotate_have_norms_and_in_the_others_queries_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = redrawn(config(**LLAMA4)), tokens(1, 13)
    seen: dict[int, list[torch.Tensor]] = {}
    plain: dict[int, list[torch.Tensor]] = {}
    for layer, block in enumerate(model.blocks):
        attention = block.get_submodule("attention")
        assert isinstance(attention, GQA)

        def projected(x: Any, ctx: Any, layer: int = layer, of: GQA = attention, was: Any = attention.projected) -> Any:
            seen[layer], plain[layer] = list(was(x, ctx)), list(GQA.projected(of, x, ctx))
            return tuple(seen[layer])

        monkeypatch.setattr(attention, "projected", projected)
    model(Batch(ids))
    factors = 1 + 0.6 * torch.log(1 + torch.tensor([float((position + 1) // 4) for position in range(13)]))
    for layer in range(3):
        (q, k, v), (q0, k0, v0) = seen[layer], plain[layer]
        assert v.equal(v0)
        if layer == 1:
            assert k.equal(k0)
            same(q, q0 * factors[:, None])
        else:
            for found, before in ((q, q0), (k, k0)):
                same(found, before / (before.square().mean(-1, keepdim=True) + 1e-6).sqrt())


def test_null_and_written_out_windows_say_the_same() -> None:
    cfg = config(attention=CHUNKS | {"global_every": 1})
    assert cfg.implied()["attention.chunked"] is False and cfg.implied()["attention.window"] is None
