"""Norms, residual branches, embedding and head by their formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.errors import ConfigError
from lm.hf.io.writing import family_for
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.head import Head
from lm.nn.model_config import model_config
from lm.nn.norm import Branch, LayerNormConfig, LayerScale, NormConfig, OutputNorm, PreNorm, RMSNormConfig, build_residual
from lm.nn.transformer import EncoderDecoderLM, build_model
from lm.ops.norm import rms_norm
from lm.testing.models import redraw, tokens
from lm.training.optim.traits import traits_of
from tests.nn.models import CLOSE, DELTA, config, redrawn

pytestmark = pytest.mark.usefixtures("doubles")

D = 12


def drawn(module: nn.Module) -> nn.Module:
    redraw(module)
    return module


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_zero_centred_weight_is_the_difference_from_one(requires_grad: bool) -> None:
    norm = drawn(RMSNormConfig(zero_centered=True).build(D))
    x = torch.randn(3, D, requires_grad=requires_grad)
    assert isinstance(norm.weight, Tensor)
    torch.testing.assert_close(norm(x), rms_norm(x, 1 + norm.weight, 1e-6), **CLOSE)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_zero_centred_weight_starts_at_zero_and_others_at_one(kind: str) -> None:
    for zero_centered, start in ((True, 0.0), (False, 1.0)):
        model = build_model(config(norm={"kind": kind, "zero_centered": zero_centered}), seed=0)
        assert (model.norm.weight == start).all() and (model.blocks[0].ffn_residual.norm.weight == start).all()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_norm_without_weight_is_one_whose_weight_is_one(requires_grad: bool) -> None:
    x = 3 * torch.randn(3, D, requires_grad=requires_grad)
    rms, layer = RMSNormConfig(weight=False).build(D), LayerNormConfig(weight=False, bias=False).build(D)
    assert not [*rms.parameters(), *layer.parameters()]
    torch.testing.assert_close(rms(x), rms_norm(x, torch.ones(D), 1e-6), **CLOSE)
    torch.testing.assert_close(layer(x), F.layer_norm(x, (D,), torch.ones(D), torch.zeros(D)), **CLOSE)


@pytest.mark.parametrize("cfg", [RMSNormConfig(place="pre"), LayerNormConfig(place="pre"), RMSNormConfig(weight=False)])
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("learned", [False, True])
def test_each_place_of_the_norm_follows_its_formula(cfg: NormConfig, factor: float, learned: bool) -> None:
    x, double = torch.randn(3, D), (lambda h: h * h + 2)
    for place in ("pre", "post", "sandwich", "output"):
        branch = LayerScale(0.0, factor, 0.0, D, 0.1) if learned else Branch(0.0, factor)
        torch.nn.init.zeros_(branch.gain) if isinstance(branch, LayerScale) else None
        residual = build_residual(cfg.replace(place=place), D, branch)
        redraw(residual)
        n, scale = residual.norm, factor * branch.gain.detach() if isinstance(branch, LayerScale) else factor
        expected = {
            "pre": lambda n=n, scale=scale: x + scale * double(n(x)),
            "post": lambda n=n, scale=scale: n(x + scale * double(x)),
            "output": lambda n=n, scale=scale: x + scale * n(double(x)),
            "sandwich": lambda n=n, scale=scale, residual=residual: x + scale * residual.norm_out(double(n(x))),
        }[place]()
        torch.testing.assert_close(residual(x, double), expected, **CLOSE)


@torch.no_grad()
def test_recurrent_layers_have_a_place_of_norms_of_their_own() -> None:
    """As in OLMo Hybrid: before their sublayers, and behind those of layers that attend."""
    block: dict[str, Any] = {"kind": "sequential", "recurrent_place": "pre"}
    model = redrawn(config(norm={"kind": "rms", "place": "output"}, pattern=["recurrent", "attention"], recurrent=DELTA, block=block))
    residuals = [[each for name, each in b.named_children() if name.endswith("residual")] for b in model.blocks]
    assert [[type(each) for each in of] for of in residuals] == [[PreNorm] * 2, [OutputNorm] * 2, [PreNorm] * 2]
    assert isinstance(model.norm, nn.Module) and not isinstance(model.norm, nn.Identity)
    with pytest.raises(ConfigError, match="first_norm=false leaves out a norm before a mixer, and recurrent_place=post"):
        config(pattern=["recurrent", "attention"], recurrent=DELTA, block={**block, "recurrent_place": "post", "first_norm": False})
    with pytest.raises(ConfigError, match=r"recurrent_place=pre is of recurrent layers, and there are none. Use norm.place"):
        config(block=block)
    options = {key: value for key, value in model.cfg.tree().items() if key != "mtp"}
    both = build_model(model_config({**options, "kind": "encoder_decoder"}))
    assert isinstance(both, EncoderDecoderLM)
    assert {type(b.attention_residual) for b in both.encoder.blocks} == {OutputNorm}


@pytest.mark.parametrize(
    ("kind", "names"), [("sequential", ["attention_residual.branch", "ffn_residual.branch"]), ("parallel", ["branch"])]
)
def test_what_layer_scale_multiplies_starts_small_and_no_family_of_transformers_has_a_place_for_it(kind: str, names: list[str]) -> None:
    cfg = config(block={"kind": kind, "layer_scale": 1e-5})
    plain, model = (build_model(each, seed=0) for each in (config(block={"kind": kind}), cfg))
    gains = {name: p for name, p in model.named_parameters() if name.endswith("gain")}
    assert gains.keys() == {f"blocks.{layer}.{name}.gain" for layer in range(3) for name in names}
    assert all((p == 1e-5).all() and p.shape == (32,) for p in gains.values())
    assert not gains.keys() & model.matrices() and not any(traits_of(model)[name].decays for name in gains)
    ids = tokens(1, 8)
    torch.testing.assert_close(model(ids), plain.head(plain.norm(plain.embed(ids))), atol=1e-3, rtol=0.0)  # each block is almost nothing
    if kind == "sequential":
        with pytest.raises(ConfigError, match=r"model\.block\.layer_scale=1e-05 must be null"):
            family_for(cfg)


def test_dropout_of_a_branch_leaves_the_residual_whole() -> None:
    residual = build_residual(RMSNormConfig(place="pre"), D, Branch(0.5)).train()
    x = torch.randn(64, D)
    added = residual(x, torch.ones_like) - x
    assert set(added.round(decimals=3).unique().tolist()) == {0.0, 2.0}


@torch.no_grad()
def test_the_head_scales_transforms_and_caps_in_this_order() -> None:
    options: dict[str, Any] = {"tied": False, "bias": True, "scale": 0.5, "softcap": 4.0, "transform": "gelu"}
    model = redrawn(config(head=options))
    head, hidden = model.head, torch.randn(2, 5, 32)
    assert isinstance(head, Head) and head.dense is not None and head.norm is not None
    inner = head.norm(F.gelu(F.linear(hidden, head.dense.weight, head.dense.bias)))
    logits = (0.5 * inner) @ head.weight.t() + head.bias
    torch.testing.assert_close(head(hidden), 4 * torch.tanh(logits / 4), **CLOSE)


@torch.no_grad()
def test_the_embedding_is_scaled_joined_and_then_normed() -> None:
    model = redrawn(config(embed={"scale": 3.0, "segments": 2, "norm": True}, position={"kind": "learned"}))
    ids, segments = tokens(1, 6), torch.tensor([[0, 1, 1, 0, 1, 0]])
    assert model.segment is not None and model.embed_norm is not None
    expected = model.embed_norm(3 * model.embed(ids) + model.segment(segments) + model.position.weight[:6])
    torch.testing.assert_close(model.embedded(model.embed(ids), Context.alone(model.embed(ids)), segments), expected, **CLOSE)
    assert model(Batch(ids, segments=segments)).isfinite().all()


def test_an_expert_and_a_head_start_as_matrices_of_their_size() -> None:
    ffn = {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"kind": "mlp", "hidden": 64, "bias": True}}
    model = build_model(config(ffn=ffn, d_model=64, init={"fan_in": True}), seed=0)
    experts = model.blocks[0].ffn.experts
    stds = [float(p.detach().std()) for p in (experts.up, experts.gate, experts.down)]
    assert stds == pytest.approx([1 / 8, 1 / 8, 1 / 8 / 6**0.5], rel=0.1)
    assert all((p == 0).all() for p in (experts.up_bias, experts.gate_bias, experts.down_bias))
    assert not torch.equal(experts.up[0], experts.up[1])
