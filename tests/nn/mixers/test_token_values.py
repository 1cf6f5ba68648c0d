"""Values to which some layers add a vector of the token, from a table."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm.cost.count import count
from lm.data.tokenizer.config import BytesConfig
from lm.data.tokenizer.fitting import grown
from lm.errors import ConfigError
from lm.generation.growing import grown_model
from lm.hf.io.writing import family_for
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.mixers.token_values import TABLE
from lm.nn.model_config import model_config
from lm.nn.transformer import build_model
from lm.ops.recompute import Recompute
from lm.schema import Tree
from lm.spelling import means
from lm.testing.invariants import check_rows_of_the_cache, check_sizes
from lm.testing.models import BASE, VOCAB, random_model, tokens
from lm.training.optim.traits import Rates, traits_of
from tests.nn.models import CONV, config, redrawn, with_kinds

HEADS: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "qkv_bias": True}
EMBEDDED: dict[str, Any] = {"attention": HEADS | {"value_embedding": {"channels": 5, "most": 3.0}}}
ROTATED: dict[str, Any] = {"attention": HEADS | {"qk_norm": "rotated", "value_embedding": {"every": 3, "at": 0}}}
CONVS: Tree = {"recurrent": CONV, "pattern": ["recurrent", "attention"]}


@pytest.mark.parametrize("changes", [EMBEDDED, ROTATED], ids=["one layer", "behind rotated norms"])
@pytest.mark.usefixtures("doubles")
@torch.no_grad()
def test_it_is_attention_to_whose_values_a_hook_has_added(changes: Tree) -> None:
    """v + most sigmoid(W x[:channels]) table[token], computed head by head in a model without the option."""
    of = changes["attention"]["value_embedding"]
    model, plain = redrawn(config(**changes)), redrawn(config(attention=changes["attention"] | {"value_embedding": None}))
    weights, ids = model.state_dict(), tokens(2, 17)
    [(layer, table, gate)] = [
        (int(name.split(".")[1]), table, weights.pop(name.replace("table.weight", "gate")))
        for name, table in [*weights.items()] if name.endswith("token_values.table.weight") and weights.pop(name) is table
    ]  # fmt: skip
    plain.load_state_dict(weights)

    def added(linear: nn.Module, given: tuple[Tensor], v: Tensor) -> Tensor:
        out = v.clone()
        for head in range(2):
            share = of.get("most", 2.0) / (1 + torch.exp(-(given[0][..., : of.get("channels", 12)] * gate[head]).sum(-1)))
            at = slice(8 * head, 8 * head + 8)
            out[..., at] += share[..., None] * table[ids][..., at]
        return out

    unchanged = plain(ids)
    plain.get_submodule(f"blocks.{layer}.attention.v").register_forward_hook(added)
    out = model(ids)
    assert layer == (1 if changes is EMBEDDED else 0) and gate.shape == (2, of.get("channels", 12))
    torch.testing.assert_close(out, plain(ids), atol=1e-9, rtol=1e-9)
    assert (out - unchanged).abs().max() > 0.1


@pytest.mark.parametrize(("of", "layers"), [({}, [1, 3]), ({"at": 0}, [0, 2, 4]), ({"every": 1}, [0, 1, 2, 3, 4]), ({"every": 3}, [2])])
def test_tables_stand_where_every_and_at_say_and_gates_are_half_open(of: Tree, layers: list[int]) -> None:
    model = build_model(config(n_layers=5, attention={"n_heads": 4, "value_embedding": of}), seed=0)
    weights = {name: p for name, p in model.named_parameters() if "token_values" in name}
    assert [name for name in weights if name.endswith("table.weight")] == [
        f"blocks.{i}.attention.token_values.table.weight" for i in layers
    ]
    assert all(p.shape == (VOCAB, 32) and 0.01 < p.std() < 0.03 for name, p in weights.items() if name.endswith("table.weight"))
    assert all(not p.any() for name, p in weights.items() if name.endswith("gate"))


@pytest.mark.parametrize("how", [Recompute("block"), Recompute("block", 2), Recompute("selective")], ids=str)
def test_blocks_that_are_run_again_for_the_backward_give_the_same_gradients(how: Recompute) -> None:
    model, ids = redrawn(config(**EMBEDDED)).train(), tokens(2, 17)
    expected = torch.autograd.grad(model(Batch(ids)).square().sum(), [*model.parameters()])
    model.recomputes(how)
    found = torch.autograd.grad(model(Batch(ids)).square().sum(), [*model.parameters()])
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.parametrize("changes", [EMBEDDED, ROTATED, EMBEDDED | CONVS, EMBEDDED | {"residual": {"kind": "loop", "times": 2}}])
def test_a_cache_forgets_and_reorders_and_sizes_are_told(changes: Tree) -> None:
    cfg = model_config(with_kinds(BASE | changes))
    check_rows_of_the_cache(cfg)
    check_sizes(cfg)


def test_tables_count_as_embeddings_and_cost_no_products_but_the_gate() -> None:
    plain, cfg = (count(config(attention=HEADS | {"value_embedding": of}), 16) for of in (None, {"channels": 5}))
    assert cfg.parameters - plain.parameters == VOCAB * 16 + 2 * 5
    assert cfg.non_embedding - plain.non_embedding == 2 * 5
    assert cfg.forward_flops_per_token - plain.forward_flops_per_token == 2 * 2 * 5
    assert cfg.cache_bytes_per_token == plain.cache_bytes_per_token


def test_adamw_trains_them_at_the_same_rate_at_any_width() -> None:
    """Rows are looked up, and a gate reads as many numbers at any width; Muon treats neither as a matrix."""
    model = build_model(config(d_model=64, parametrization={"kind": "mup", "base_width": 16}, **EMBEDDED), seed=0)
    found = {name: traits for name, traits in traits_of(model).items() if "token_values" in name}
    assert len(found) == 2 and all(each.rates == Rates(eps=1 / 4) and not each.matrix and each.decays for each in found.values())


def test_each_stack_of_an_encoder_decoder_has_its_own_and_cross_attention_none() -> None:
    model = random_model(model_config(with_kinds(BASE | {"kind": "encoder_decoder"} | EMBEDDED)))
    tables = [name for name, _ in model.named_parameters() if "table" in name]
    assert tables == ["blocks.1.attention.token_values.table.weight", "encoder.blocks.1.attention.token_values.table.weight"]


def test_new_tokens_get_the_mean_of_the_rows_of_those_that_there_are() -> None:
    before = BytesConfig().build()
    now, name = grown(before, ["<|new|>"]), "blocks.1.attention.token_values.table.weight"
    model = redrawn(config(vocab_size=before.vocab_size, **EMBEDDED))
    table, found = model.get_parameter(name), grown_model(model, before, now)
    assert found.vocab_size == now.vocab_size == before.vocab_size + 1 and means(TABLE, name)
    torch.testing.assert_close(found.get_parameter(name), torch.cat([table, table.mean(0, keepdim=True)]))


def test_no_family_of_transformers_has_a_place_for_it() -> None:
    with pytest.raises(ConfigError, match=r"model\.attention\.value_embedding must be null"):
        family_for(config(attention={"n_heads": 4, "value_embedding": {}}))


def test_a_block_by_itself_is_told_the_tokens() -> None:
    model, x = redrawn(config(**EMBEDDED)), torch.randn(2, 7, 32)
    ctx = Context.alone(x, model.position)
    with pytest.raises(ConfigError, match=r"value_embedding looks up tokens, and this context has none. Set ctx.tokens"):
        model.through_blocks(x, ctx)
    ctx.tokens = tokens(2, 7)
    assert model.through_blocks(x, ctx).shape == x.shape
