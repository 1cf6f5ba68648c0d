"""optim.groups and optim.layer_decay: weights with a rate or decay of their own."""

from typing import Any

import pytest

from lm.errors import ConfigError
from lm.nn.model_config import model_config
from lm.nn.transformer import LM, build_model
from lm.schema import from_tree
from lm.testing.models import BASE
from lm.training.optim.adamw import AdamWConfig
from lm.training.optim.base import OptimConfig
from lm.training.optim.muon import MuonConfig
from lm.training.optim.sgd import SGDConfig
from lm.training.optim.traits import GroupConfig, traits_of
from lm.training.weights.freeze import freeze

KINDS: list[type[OptimConfig]] = [AdamWConfig, SGDConfig, MuonConfig]
GROUPS = [
    {"match": "attention.q", "lr": 0.5},
    {"match": "blocks.1", "lr": 0.25, "weight_decay": 0.125},
    {"match": "embed", "weight_decay": 0.0},
    {"match": "attention.k", "lr_factor": 8.0},
]


def settings(cls: type[OptimConfig], model: LM, **options: Any) -> dict[str, tuple[float, float]]:
    """Peak rate and decay of each weight by name."""
    cfg = from_tree(cls, {"kind": cls.model_fields["kind"].default, **options})
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = cfg.build(named, traits_of(model, cfg.groups, cfg.layer_decay)).param_groups
    assert sum(len(group["names"]) for group in groups) == len(named)
    return {name: (group["peak_lr"], group["weight_decay"]) for group in groups for name in group["names"]}


@pytest.mark.parametrize("cls", KINDS)
def test_a_group_has_its_own_rate_and_decay_and_the_first_that_means_a_weight_counts(cls: type[OptimConfig]) -> None:
    model = build_model(model_config(BASE | {"norm": {"kind": "layer"}}), device="meta")
    plain, found = settings(cls, model), settings(cls, model, groups=GROUPS)
    for name, (lr, decay) in plain.items():
        vector = name.endswith("bias") or "norm" in name
        if ".attention.q." in name:
            assert found[name] == (0.5, decay)
        elif name.startswith("blocks.1."):
            assert found[name] == (0.25, 0.0 if vector else 0.125)
        elif ".attention.k." in name:
            assert found[name] == (8 * lr, decay)
        else:
            assert found[name] == (lr, 0.0 if name == "embed.weight" else decay)


@pytest.mark.parametrize("cls", KINDS)
def test_a_rate_is_lowered_once_for_each_block_below_the_head(cls: type[OptimConfig]) -> None:
    """And a group's own rate too, in each stack by itself."""
    changes = {"kind": "encoder_decoder", "start_token": 0, "head": {"tied": False}, "n_encoder_layers": 2}
    model = build_model(model_config(BASE | changes), device="meta")
    groups = [{"match": "attention.k", "lr": 1.0}, {"match": "attention.v", "lr_factor": 3.0}]
    plain, found = settings(cls, model), settings(cls, model, layer_decay=0.5, groups=groups)
    factors = {
        "embed": 0.5**4,
        "blocks.0": 0.5**3,
        "blocks.2": 0.5,
        "norm": 1.0,
        "head": 1.0,
        "encoder.blocks.0": 0.25,
        "encoder.norm": 1.0,
    }
    checked = 0
    for name, (lr, _) in plain.items():
        for start, factor in factors.items():
            if name.startswith(f"{start}."):
                own = 1.0 if ".attention.k." in name else 3 * lr if ".attention.v." in name else lr
                assert found[name][0] == pytest.approx(own * factor), name
                checked += 1
    assert checked > 30


def test_muon_has_a_rate_for_what_is_looked_up_by_token_and_a_group_goes_before_it() -> None:
    attention = {"kind": "gqa", "n_heads": 4, "value_embedding": {"every": 1}}
    changes = {"attention": attention, "position": {"kind": "learned"}, "embed": {"segments": 2}, "head": {"tied": False}}
    model = build_model(model_config(BASE | changes), device="meta")
    groups = [{"match": "blocks.1", "weight_decay": 0.5}, {"match": "blocks.2", "lr": 1.0}]
    plain, found = (settings(MuonConfig, model, groups=groups, layer_decay=0.5, **own) for own in ({}, {"embed_lr": 0.25}))
    tables = {"embed.weight": 0.25 * 0.5**4, "blocks.0.attention.token_values.table.weight": 0.25 * 0.5**3}
    tables["blocks.1.attention.token_values.table.weight"] = 0.25 * 0.5**2
    assert {name: lr for name, (lr, _) in found.items() if found[name] != plain[name]} == tables
    tied = build_model(model_config(BASE), device="meta")
    assert settings(MuonConfig, tied, embed_lr=0.25)["embed.weight"] == (0.25, 0.0)


def test_a_group_of_nothing_that_is_trained_is_refused() -> None:
    model = build_model(model_config(BASE), device="meta")
    freeze(model, ["embed"])
    for match in ("embed", "blocks.7"):
        with pytest.raises(ConfigError, match=rf"optim\.groups: no weight that is trained has a name like '{match}'\. Near are "):
            settings(AdamWConfig, model, groups=[{"match": match, "lr": 1.0}])


def test_a_group_that_sets_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"match=embed has neither lr, lr_factor nor weight_decay\. Set one of them, or drop the group\."):
        GroupConfig(match="embed")
    with pytest.raises(ConfigError, match=r"match=embed has both lr=0\.1 and lr_factor=2\. Leave one out\."):
        GroupConfig(match="embed", lr=0.1, lr_factor=2)
