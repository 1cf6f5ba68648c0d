"""Layers that read others' keys, have other heads, or vectors of their own; transformers is the reference of all of them together."""

from typing import Any

import pytest
import torch

from lm.errors import ConfigError
from lm.nn.per_layer import PerLayer
from lm.nn.transformer import build_model
from lm.ops.cache.cache import numbers
from lm.testing.models import tokens
from tests.nn.models import config, redrawn

WINDOWED: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "window": 6, "global_every": 2}


def test_what_reads_the_keys_of_another_layer_keeps_none_in_the_cache() -> None:
    """Layers 3 and 4 of 5 read those of 1 and 2, the last ones that see as far."""
    cfg = config(attention=WINDOWED | {"shared_layers": 2}, n_layers=5)
    model = build_model(cfg, seed=0)
    assert [getattr(block.attention, "source", None) for block in model.blocks] == [None, None, None, 1, 2]
    whole = build_model(config(attention=WINDOWED, n_layers=5), seed=0)
    assert numbers(model.states())[0] * 5 == numbers(whole.states())[0] * 3
    gone = sum(p.numel() for p in whole.parameters()) - sum(p.numel() for p in model.parameters())
    assert gone == 2 * 2 * 16 * 32  # k and v of two layers


def test_keys_that_two_layers_read_are_changed_by_both() -> None:
    """The source's gradient is not that of its own scores alone."""
    model, ids = redrawn(config(attention={"n_heads": 4, "shared_layers": 1})).train(), tokens(2, 12)
    model(ids).square().sum().backward()
    [source] = [model.blocks[1].attention.k.weight.grad]
    assert source is not None and model.blocks[0].attention.k.weight.grad is not None
    whole = source.clone()
    model.zero_grad()
    model.blocks[2].attention.o.weight.data.zero_()
    model(ids).square().sum().backward()
    assert not torch.allclose(model.blocks[1].attention.k.weight.grad, whole)


def test_each_layer_reads_its_own_vectors_alone() -> None:
    """A change of those of the last layer reaches no earlier one."""
    model, ids = redrawn(config(embed={"per_layer": {"channels": 6}})), tokens(2, 12)
    seen: list[torch.Tensor] = []
    model.blocks[1].register_forward_hook(lambda block, args, out: seen.append(out))
    assert isinstance(model.per_layer, PerLayer)
    first = model(ids)
    with torch.no_grad():
        model.per_layer.rows.table.weight[:, -6:] += 1.0
    assert not torch.allclose(model(ids), first) and torch.equal(*seen)


def test_their_table_learns_as_the_embedding_does() -> None:
    cfg = config(embed={"per_layer": {"channels": 6}})
    model = build_model(cfg, seed=0)
    assert model.tables() == {"embed.weight", "per_layer.rows.table.weight"}
    assert model.roles()["blocks.0.read.out.weight"] == "hidden" and "blocks.0.read.gate.weight" in model.matrices()


def test_a_parametrization_of_head_widths_takes_no_two() -> None:
    mup = {"parametrization": {"kind": "mup", "base_width": 16, "base_head_dim": 4}}
    config(attention=WINDOWED | {"global_heads": {"n_kv_heads": 1}}, **mup)
    with pytest.raises(ConfigError, match=r"sets attention\.scale by base_head_dim for heads of one width, and attention\.global_heads"):
        config(attention=WINDOWED | {"global_heads": {"head_dim": 16}}, **mup)


def test_what_options_mean_where_all_layers_or_none_have_the_other_heads() -> None:
    other = WINDOWED | {"global_heads": {"n_kv_heads": 1, "head_dim": 12}}
    found = [config(attention=other, **changes).implied() for changes in ({}, {"n_layers": 1})]
    assert (found[0]["attention.global_heads.head_dim"], found[0]["attention.head_dim"]) == (12, 8)
    assert (found[1]["attention.global_heads.head_dim"], found[1]["attention.head_dim"]) == (None, 8)
    all_of_them = config(attention=other | {"global_every": 1}).implied()
    assert (all_of_them["attention.global_heads.head_dim"], all_of_them["attention.head_dim"]) == (None, 12)
    assert (all_of_them["attention.n_kv_heads"], all_of_them["attention.window"]) == (1, None)


def test_layers_that_only_recur_share_no_keys() -> None:
    """Seen to fail: such a model could not be built, for a layer that there was not."""
    model = redrawn(
        config(
            attention={"n_heads": 4, "shared_layers": 3}, recurrent={"kind": "short_conv"}, pattern=["recurrent"], position={"kind": "none"}
        )
    )
    assert torch.isfinite(model(tokens(2, 9))).all()
