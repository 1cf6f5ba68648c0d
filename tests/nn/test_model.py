"""What a model as a whole promises beside the invariants: its initial weights, dropout, windows, readers."""

import math
import pickle
import re
from typing import Any

import pytest
import torch

from lm.errors import ConfigError
from lm.nn.batch import Batch
from lm.nn.head import last_position
from lm.nn.mixers.gqa import GQAConfig
from lm.nn.model_config import model_config
from lm.nn.transformer import EncoderDecoderConfig, build_model
from lm.schema import Tree, from_tree
from lm.testing.invariants import check_sizes
from lm.testing.models import BASE, tokens
from tests.nn.models import CONV, FFNS, GPT_OSS, MIXTURES, config, redrawn, with_kinds

pytestmark = pytest.mark.usefixtures("doubles")


@pytest.mark.parametrize("changes", [{}, {"ffn": MIXTURES[0]}, {"recurrent": CONV, "pattern": ["recurrent", "attention"]}], ids=str)
def test_draws_shapes_and_the_outline_need_the_config_alone(changes: Tree) -> None:
    check_sizes(model_config(BASE | changes))


@torch.no_grad()
def test_the_last_position_reader_equals_the_last_logits() -> None:
    model = redrawn(config())
    ids = tokens(2, 9)
    torch.testing.assert_close(model(Batch(ids), read=last_position), model(Batch(ids))[:, -1])


def test_a_tensor_is_a_batch_of_tokens() -> None:
    model, ids = redrawn(config()), tokens(2, 7)
    assert torch.equal(model(ids), model(Batch(ids)))
    for given in (ids[0], ids[None]):  # the first was an IndexError
        shape = re.escape(str(tuple(given.shape)))
        with pytest.raises(ConfigError, match=rf"batch: a tensor of shape {shape} was given\. .* ids\.unsqueeze"):
            model(given)


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


def test_projections_into_the_residual_start_by_the_sublayers_of_their_stack() -> None:
    cfg = model_config(with_kinds(BASE | {"kind": "encoder_decoder", "d_model": 64, "n_layers": 2, "n_encoder_layers": 6}))
    weights = dict(build_model(cfg, seed=0).named_parameters())
    drawn = {name: float(weights[f"{name}.weight"].detach().std()) / 0.02 for name in OUT}
    assert drawn == pytest.approx(OUT, rel=0.06)


OUT = {
    **dict.fromkeys(("blocks.1.attention.o", "blocks.0.cross.o", "blocks.1.ffn.down"), 1 / math.sqrt(3 * 2)),
    **dict.fromkeys(("encoder.blocks.5.attention.o", "encoder.blocks.0.ffn.down"), 1 / math.sqrt(2 * 6)),
    **dict.fromkeys(("blocks.0.attention.q", "encoder.blocks.0.ffn.up"), 1.0),
}


def test_a_tied_embedding_starts_like_an_untied_one() -> None:
    tied, untied = (build_model(config(head={"tied": tied}, init={"fan_in": True}), seed=3) for tied in (True, False))
    assert torch.equal(tied.embed.weight, untied.embed.weight)
    assert float(tied.embed.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


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


@pytest.mark.parametrize(("at", "windows"), [(None, [4, 4, None, 4, 4, None, 4]), (0, [None, 4, 4, None, 4, 4, None])])
def test_every_nth_layer_is_global(at: int | None, windows: list[int | None]) -> None:
    attention = config(attention={"n_heads": 4, "window": 4, "global_every": 3, "global_at": at}).attention
    assert [attention.layer_window(layer) for layer in range(7)] == windows


@pytest.mark.parametrize("n_layers", range(1, 8))
def test_which_layers_are_global_is_said_in_one_way(n_layers: int) -> None:
    """Whatever is set, `implied` has the least number and place of these layers."""
    seen: dict[tuple[bool, ...], set[tuple[Any, Any]]] = {}
    for every in range(1, 10):
        for at in (None, *range(every)):
            cfg = GQAConfig(n_heads=4, window=4, global_every=every, global_at=at)
            implied = cfg.implied(32, range(n_layers))
            again = cfg.replace(**{key: implied[key] for key in ("window", "global_every", "global_at")})
            layers = tuple(cfg.layer_window(layer) is None for layer in range(n_layers))
            assert layers == tuple(again.layer_window(layer) is None for layer in range(n_layers))
            seen.setdefault(layers, set()).add((implied["global_every"], implied["global_at"]))
    assert len(seen) > n_layers and all(len(ways) == 1 for ways in seen.values())


def test_windows_of_layers_that_do_not_attend_are_of_no_account() -> None:
    """Where of four layers the second and the last attend: that the last sees all is said in one way, and a window of no other is none."""
    conv: dict[str, Any] = {"recurrent": {"kind": "short_conv"}, "pattern": ["recurrent", "attention"], "n_layers": 4}
    implied = [
        config(**conv, attention={"n_heads": 4, "window": 4, "global_every": every, "global_at": at}).implied()
        for every, at in ((4, None), (6, 3), (3, 0), (2, None))
    ]
    found = [tuple(each[f"attention.{key}"] for key in ("window", "global_every", "global_at")) for each in implied]
    assert found == [(4, 3, 0)] * 3 + [(None, None, None)]


def test_windows_of_an_encoder_are_of_account_where_its_decoder_does_not_attend() -> None:
    conv = {"kind": "encoder_decoder", "recurrent": {"kind": "short_conv"}, "pattern": ["recurrent", "attention"], "n_layers": 4}
    tree = with_kinds(BASE | conv | {"attention": {"n_heads": 4, "window": 4, "global_every": 2}})
    assert from_tree(EncoderDecoderConfig, tree).implied()["attention.window"] == 4


def test_the_pattern_repeats_over_the_layers_and_an_encoder_attends() -> None:
    hybrid = {"recurrent": CONV, "pattern": ["recurrent", "recurrent", "attention"]}
    model = build_model(config(n_layers=5, mtp={"depth": 1}, **hybrid), device="meta")
    names = [next(iter(dict(unit.named_children()))) for unit in model.blocks]
    assert names == ["recurrent", "recurrent", "attention", "recurrent", "recurrent"]
    assert "mtp.0.block.attention.q.weight" in dict(model.named_parameters())  # layer 5
    both = build_model(model_config(with_kinds(BASE | {"kind": "encoder_decoder"} | hybrid)), device="meta")
    found = {name.removesuffix(".o.weight") for name, _ in both.named_parameters() if name.endswith(".o.weight")}
    assert {name for name in found if "recurrent" in name} == {"blocks.0.recurrent", "blocks.1.recurrent"}
    assert {f"encoder.blocks.{layer}.attention" for layer in range(3)} <= found


def test_what_a_model_steers_has_a_name_and_what_is_frozen_has_none() -> None:
    model = build_model(config(ffn=MIXTURES[2], mtp={"depth": 1}), seed=0)
    model.embed.requires_grad_(False)
    at = ["blocks.1", "blocks.2", "mtp.0.block"]
    assert list(model.self_updated()) == [f"{block}.ffn.router.correction_bias" for block in at]
    before = {name: p.clone() for name, p in model.self_updated().items()}
    model.balance(torch.arange(6.0).expand(3, -1))
    assert all((p - before[name]).tolist() == pytest.approx([0.001] * 3 + [-0.001] * 3) for name, p in model.self_updated().items())
    assert redrawn(config()).self_updated() == {}


@pytest.mark.parametrize("ffn", [*FFNS, GPT_OSS, MIXTURES[0]], ids=str)
def test_a_model_can_be_pickled(ffn: dict[str, Any]) -> None:
    """For torch.save, and for a process of its own. Seen to fail wherever a feed-forward was gated."""
    model = redrawn(config(ffn=ffn))
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids), model(ids))
