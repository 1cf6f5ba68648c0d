"""Stochastic depth: in training, sublayers that add nothing to some rows."""

import pytest
import torch

from lm.generation.weights.fused import FusedBlock
from lm.generation.weights.prepare import prepare
from lm.hf.io.writing import family_for
from lm.nn.batch import Batch
from lm.nn.model_config import model_config
from lm.nn.norm import Branch, skipped
from lm.nn.transformer import LM, build_model
from lm.ops.recompute import Recompute
from lm.schema import Tree
from lm.testing.models import BASE, tokens
from tests.nn.models import config, redrawn, with_kinds

NEVER = 1 - 1e-7  # that a row is kept


def block(**options: object) -> Tree:
    return {"block": {"kind": "sequential"} | options}


def rates(model: LM) -> dict[str, float]:
    return {name: module.skip for name, module in model.named_modules() if isinstance(module, Branch)}


def test_a_row_is_left_out_whole_or_kept_and_made_larger() -> None:
    x, n, p = torch.randn(20_000, 3, 2), 20_000, 0.3
    out = skipped(x, p)
    kept = out.flatten(1).any(1)
    torch.testing.assert_close(out[kept], x[kept] / (1 - p))
    assert not out[~kept].any() and abs(int(kept.sum()) - n * (1 - p)) < 5 * (n * p * (1 - p)) ** 0.5


def test_rates_grow_with_the_depth_of_a_stack_or_are_all_alike() -> None:
    model = build_model(config(n_layers=4, mtp={"depth": 1}, **block(layer_dropout=0.4)), device="meta")
    found = rates(model)
    assert [found[f"blocks.{i}.{part}_residual.branch"] for i in range(4) for part in ("attention", "ffn")] == pytest.approx(
        [0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4]
    )
    assert found["mtp.0.block.ffn_residual.branch"] == 0.4
    alike = build_model(config(n_layers=4, **block(layer_dropout=0.4, layer_dropout_grows=False, layer_scale=0.1)), device="meta")
    assert [*rates(alike).values()] == [0.4] * 8
    tree = with_kinds(BASE | {"kind": "encoder_decoder", "n_encoder_layers": 5, "n_layers": 2} | block(layer_dropout=0.5))
    both = rates(build_model(model_config(tree), device="meta"))
    assert [both[f"encoder.blocks.{i}.ffn_residual.branch"] for i in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert [both[f"blocks.{i}.cross_residual.branch"] for i in range(2)] == [0.25, 0.5]


@pytest.mark.parametrize("kind", ["sequential", "parallel"])
def test_what_is_left_out_leaves_the_stream_as_it_was_in_training_alone(kind: str) -> None:
    options = {"kind": kind, "layer_dropout": NEVER, "layer_dropout_grows": False}
    model, plain, ids = redrawn(config(block=options)), redrawn(config(block={"kind": kind})), tokens(3, 9)
    torch.testing.assert_close(model(ids), plain(ids), atol=0, rtol=0)
    assert not torch.allclose(model.train()(ids), plain(ids))
    torch.testing.assert_close(model(ids), model.head(model.norm(model.embed(ids))))


def test_rows_are_drawn_for_one_by_one_and_sublayer_by_sublayer() -> None:
    """With one layer, a row is one of four: with both sublayers, either, or none."""
    model, ids = redrawn(config(n_layers=1, **block(layer_dropout=0.5))).train(), tokens(1, 5).expand(64, -1)
    assert len(model(ids)[:, -1].round(decimals=3).unique(dim=0)) == 4


@pytest.mark.parametrize("how", [Recompute("block"), Recompute("selective")], ids=str)
def test_blocks_that_are_run_again_for_the_backward_leave_out_the_same(how: Recompute) -> None:
    model, ids, found = redrawn(config(**block(layer_dropout=0.7))).train(), tokens(6, 17), []
    for recompute in (Recompute(), how):
        model.recomputes(recompute)
        torch.manual_seed(3)
        found.append(torch.autograd.grad(model(Batch(ids)).square().sum(), [*model.parameters()]))
    torch.testing.assert_close(*found, atol=0, rtol=0)


def test_a_trained_model_is_one_without_it_to_exports_and_to_decoding() -> None:
    cfg = config(head={"tied": False}, attention={"n_heads": 4, "n_kv_heads": 2}, **block(layer_dropout=0.3, layer_dropout_grows=False))
    assert family_for(cfg) is family_for(cfg.replace(block={"kind": "sequential"}))
    assert all(isinstance(each, FusedBlock) for each in prepare(redrawn(cfg)).blocks)


def test_rows_in_slices_are_refused() -> None:
    assert config(**block(layer_dropout=0.2)).why_not_context_parallel(2) == (
        "model.block.layer_dropout is drawn for a row, of which a rank has a slice. Set model.block.layer_dropout=0"
    )
    assert config().why_not_context_parallel(2) is None
