"""muP and CompleteP: what each weight is told, against the papers' table read off shapes; and activations that change alike at any size."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm.adapters.adapter import LoRAConfig, adapting
from lm.errors import ConfigError
from lm.losses.tokens import causal_reader
from lm.nn.batch import Batch
from lm.nn.init import Declares
from lm.nn.model_config import ModelConfig, model_config
from lm.nn.transformer import LM, build_model
from lm.schema import Tree
from lm.testing.models import Doubles, random_model, same, tokens
from lm.training.optim.adamw import AdamWConfig
from lm.training.optim.base import OptimConfig, begin_state
from lm.training.optim.muon import MuonConfig
from lm.training.optim.traits import traits_of
from tests.training.steps import ADAMW, SGD, config

BASE, DEPTH, M, L = 32, 2, 4, 3
MUP: Tree = {"kind": "mup", "base_width": BASE}
COMPLETEP: Tree = {"kind": "completep", "base_width": BASE, "base_depth": DEPTH}
MOE: Tree = {
    "kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"kind": "mlp", "bias": True}, "n_shared": 1,
    "router": {"kind": "softmax", "bias": True}, "dense": {"kind": "mlp"}, "first_dense": 1,
}  # fmt: skip
LATENT: Tree = {"kind": "mla", "nope_dim": 8, "rope_dim": 8, "v_dim": 8}
ENCODER: Tree = {"kind": "encoder", "embed": {"segments": 2}, "head": {"transform": "gelu"}, "norm": {"kind": "rms", "place": "post"}}
KINDS: dict[str, Tree] = {
    "tied, biases": {"norm": {"kind": "layer"}, "position": {"kind": "learned"}, "attention.qkv_bias": True, "ffn.bias": True, "init": {}},
    "untied, experts, mtp": {"head": {"tied": False, "bias": True}, "ffn": MOE, "mtp": {"depth": 1}, "attention.qk_norm": "full"},
    "convolution": {"recurrent": {"kind": "short_conv"}, "pattern": ["recurrent", "attention"], "init": {"fan_in": True}},
    "latent, fan_in": {"attention": LATENT, "head": {"tied": False}, "init": {"fan_in": True}},
    "encoder": ENCODER,
    "hyper-connections": {"residual": {"kind": "hyper", "streams": 2, "sinkhorn": 3}},
    "encoder-decoder": {"kind": "encoder_decoder", "position": {"kind": "t5_relative"}},
}  # fmt: skip
FURTHER = ("qkv_bias", "bias", "qk_norm", "scale")
TABLES = ("embed.weight", "position.weight", "position.table.weight", "segment.weight")


def model(width: int = BASE, depth: int = DEPTH, **changes: Any) -> ModelConfig:
    """All widths grow together: more heads and latents, a wider feed-forward."""
    inner = {slot: {key: changes.pop(f"{slot}.{key}") for key in FURTHER if f"{slot}.{key}" in changes} for slot in ("attention", "ffn")}
    heads, ffn = {"kind": "gqa", "n_heads": width // 8} | inner["attention"], {"kind": "mlp", "gated": False} | inner["ffn"]
    tree: Tree = {
        "kind": "decoder", "vocab_size": 61, "max_seq_len": 16, "d_model": width, "n_layers": depth, "norm": {"kind": "rms"},
        "position": {"kind": "rope"}, "attention": heads, "ffn": ffn, "init": {"out_scale": 1.0},
    } | changes  # fmt: skip
    if tree["attention"]["kind"] == "mla":
        tree["attention"] = tree["attention"] | {"n_heads": width // 8, "kv_rank": width // 2, "q_rank": width // 2}
    for mlp in (tree["ffn"], *(tree["ffn"].get(name, {}) for name in ("expert", "dense"))):
        if mlp.get("kind") == "mlp":
            mlp["hidden"] = 3 * width
    return model_config(tree)


def expected(name: str, grown: Sequence[bool], m: float, depth: float) -> tuple[str, float, float, float, float]:
    """The class of a weight by the dimensions that grow with the width, and its AdamW rate, Muon rate, eps and initial deviation."""
    depth = depth if "blocks." in name or name.startswith("mtp.") else 1
    if name == "head.weight" or name.endswith(TABLES) or name.endswith("bias") or len(grown) == 1 or not grown[-1]:
        return "vector", 1, 1, 1 / m / depth, 1
    if grown[-2]:
        return "hidden", 1 / m, 1, 1 / m / depth, 1 / math.sqrt(m)
    return "scores", 1 / m, 1 / math.sqrt(m), 1 / depth, 1 / m


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_starts_and_learns_as_the_papers_table_says_of_its_shape(kind: str) -> None:
    small = build_model(model(**KINDS[kind]), seed=0)
    big = build_model(model(M * BASE, L * DEPTH, **KINDS[kind], parametrization=COMPLETEP), seed=0)
    shapes, named = {name: p.shape for name, p in small.named_parameters()}, [*big.named_parameters()]
    before, seen = dict(small.named_parameters()), set()
    decay = {"weight_decay": 0.25}
    for optim in (AdamWConfig(lr=0.5, eps=1e-3, **decay), MuonConfig(lr=0.5, adam_lr=0.5, adam_weight_decay=0.25, **decay)):
        groups = optim.build(named, traits_of(big)).param_groups
        assert groups[-1]["lr"] == 0.5  # which metrics show
        for group in groups:
            for name in group["names"]:
                twin = name if name in shapes else ".".join("0" if part.isdigit() else part for part in name.split("."))
                if twin not in shapes:  # of a layer that the small model has not: layer 1 is of the other kind
                    twin = name.replace(name.split("blocks.")[1].split(".")[0], "1", 1)
                p = big.get_parameter(name)
                grown = [a != b for a, b in zip(p.shape, shapes[twin], strict=True)]
                role, adam, muon, eps, std = expected(name, grown, M, L)
                rate = muon if "momentum" in group else adam
                assert group["lr"] == pytest.approx(0.5 * rate), name
                assert group["weight_decay"] in (0, pytest.approx(0.25 / rate)), name
                assert "eps" not in group or group["eps"] == pytest.approx(optim.eps * eps), name
                if name == twin and p.numel() > 300 and before[name].std() > 0:
                    assert float(p.detach().std() / before[name].detach().std()) == pytest.approx(std, rel=0.25), name
                seen.add(role)
    assert seen == {"vector", "hidden", *(["scores"] if "experts" in kind or "hyper" in kind else [])}


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_base_size_all_is_the_standard_parametrization_to_the_bit(kind: str) -> None:
    plain = build_model(model(**KINDS[kind]), seed=0)
    for parametrization in (MUP, COMPLETEP, COMPLETEP | {"base_head_dim": 16 if "latent" in kind else 8}):
        found = build_model(model(**KINDS[kind], parametrization=parametrization), seed=0)
        assert all(torch.equal(p, q) for p, q in zip(found.parameters(), plain.parameters(), strict=True))
        assert traits_of(found) == traits_of(plain)
        assert found.cfg.written_out() == plain.cfg and found.cfg != plain.cfg
        assert repr(found) == repr(plain) and found.head.scale == plain.head.scale


def test_the_multipliers_are_those_of_the_slots() -> None:
    scaled: Tree = {"head": {"scale": 0.5}, "block": {"kind": "sequential", "residual_scale": 0.6}}
    found = model(4 * BASE, 6, **scaled, parametrization=COMPLETEP | {"base_head_dim": 2})
    slots: Tree = {"head": {"scale": 0.125}, "block": {"kind": "sequential", "residual_scale": 0.2}, "attention.scale": math.sqrt(2) / 8}
    with Doubles(), torch.no_grad():
        ours, theirs = (random_model(cfg).double()(tokens(2, 9)) for cfg in (found, model(4 * BASE, 6, **slots)))
    same(ours, theirs)


def changes(cfg: ModelConfig, optim: OptimConfig, steps: int = 4) -> dict[str, float]:
    """How far a few steps on one batch move what embedding, blocks, mixers, feed-forwards and head compute: root mean squares."""
    found = build_model(cfg, seed=0).train()
    optimizer: Any = optim.build([*found.named_parameters()], traits_of(found))
    begin_state(optimizer)
    source = torch.Generator().manual_seed(1)
    given = torch.randint(0, 61, (8, 16), generator=source)
    labels, seen = given.roll(1, 1), dict[str, Tensor]()
    for name, module in found.named_modules():
        last = name.rpartition(".")[2]
        if last in ("embed", "attention", "recurrent", "ffn", "q") or last.isdigit():
            module.register_forward_hook(lambda _, __, out, name=name: seen.__setitem__(name, out.detach()))

    @torch.no_grad()
    def look() -> dict[str, Tensor]:
        return {"logits": found(given)} | seen

    start = look()
    for _ in range(steps):
        optimizer.zero_grad()
        (found(Batch(given), causal_reader(labels)).total / labels.numel()).backward()
        optimizer.step()
    return {name: float((now - start[name]).square().mean().sqrt()) for name, now in look().items()}


def slopes(results: list[dict[str, float]], sizes: Sequence[int]) -> dict[str, float]:
    """Of log change against log size, by least squares: 0 is flat, 1 grows as the size does."""
    x = torch.tensor([math.log(size) for size in sizes])
    x = x - x.mean()
    return {name: float(x @ torch.tensor([math.log(result[name]) for result in results]) / x.square().sum()) for name in results[0]}


ADAM = AdamWConfig(lr=2**-7)
NARROW_START: Tree = {"init": {"std": 0.02}}
CHECKS: dict[str, tuple[OptimConfig, Tree]] = {
    "adamw": (ADAM, NARROW_START),
    "adamw, untied": (ADAM, {"head": {"tied": False}, "init": {"fan_in": True}}),
    "adamw, experts": (ADAM, NARROW_START | {"ffn": MOE | {"expert": {"kind": "mlp"}, "router": {"kind": "softmax"}}}),
    "adamw, latent": (ADAM, NARROW_START | {"attention": KINDS["latent, fan_in"]["attention"]}),
    "adamw, convolution": (ADAM, KINDS["convolution"]),
    "muon": (MuonConfig(), NARROW_START),
}


def slopes_over_widths(check: str, widths: Sequence[int], parametrization: Tree) -> dict[str, float]:
    optim, tree = CHECKS[check]
    return slopes([changes(model(width, **tree, parametrization=parametrization), optim) for width in widths], widths)


@pytest.mark.parametrize(
    ("check", "widths"),
    [("adamw", (32, 64, 128)), *(pytest.param(check, (64, 128, 256, 512), marks=pytest.mark.slow) for check in CHECKS)],
)
def test_coordinates_change_alike_at_any_width_under_mup_alone(check: str, widths: Sequence[int]) -> None:
    flat, standard = (slopes_over_widths(check, widths, kind) for kind in (MUP, {"kind": "standard"}))
    assert max(map(abs, flat.values())) < 0.3, flat
    assert standard["logits"] > 0.6 if check != "adamw, untied" else standard["logits"] > 0.3
    assert check == "muon" or min(standard[f"blocks.{i}"] for i in (0, 1)) > 0.6, standard


def test_coordinates_change_alike_at_any_depth_under_completep_alone() -> None:
    depths, found = (2, 4, 8), []
    for parametrization in (COMPLETEP, MUP):
        moved = [changes(model(BASE, depth, **NARROW_START, parametrization=parametrization), ADAM) for depth in depths]
        ends = {"first": "blocks.0.ffn", "logits": "logits"}
        each = [{key: r[name] for key, name in (ends | {"last": f"blocks.{n - 1}"}).items()} for r, n in zip(moved, depths, strict=True)]
        found.append(slopes(each, depths))
    assert max(map(abs, found[0].values())) < 0.2 and found[1]["last"] > 0.6, found


class Own(Declares, nn.Module):
    """Draws a matrix by a function of its own."""

    initializers = {"weight": lambda shape, init: init.normal(shape, 1.0)}

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))


def with_own(parametrization: Tree) -> LM:
    found = build_model(model(2 * BASE, parametrization=parametrization), device="meta")
    found.blocks[0].add_module("own", Own())
    return found


def test_an_adapter_beside_a_wider_model_learns_at_the_rate_that_is_given() -> None:
    """Seen to fail: its matrices were refused, as those of a plugin that does not tell what it reads."""
    found = build_model(model(2 * BASE, parametrization={"kind": "mup", "base_width": BASE}), device="meta")
    LoRAConfig(rank=2, dora=True).apply(found)
    traits = traits_of(found)
    assert {traits[name].rates.adam for name in adapting(found)} == {1.0}
    assert traits["blocks.0.attention.q.weight"].rates.adam == 1 / 2


def test_what_a_parametrization_cannot_reach_is_refused() -> None:
    narrow: Tree = {"parametrization": {"kind": "mup", "base_width": 8}}
    assert config(ADAMW, model=narrow).model.growth().width == 4
    with pytest.raises(ConfigError, match=r"optim=sgd has no rule for model\.parametrization=mup\. Use optim=adamw or muon\."):
        config(SGD, model=narrow)
    assert not traits_of(with_own({"kind": "standard"}))["blocks.0.own.weight"].matrix
    with pytest.raises(ConfigError, match=r"mup: blocks\.0\.own\.weight has an initializer of its own, which does not tell"):
        traits_of(with_own(MUP))
