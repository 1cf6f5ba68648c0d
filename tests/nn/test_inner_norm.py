"""Norms before the last matrix of a sublayer: against transformers' BitNet, whose weights are not rounded here, and against the formula."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import BitNetConfig, BitNetForCausalLM

from lm.errors import ConfigError
from lm.hf.io.writing import family_for
from lm.nn.context import Context
from lm.nn.ffn.mlp import MLPConfig
from lm.nn.mixers.gqa import GQAConfig
from lm.nn.model_config import model_config
from lm.nn.norm import LayerNormConfig, RMSNormConfig
from lm.schema import Tree
from lm.testing.models import BASE, random_model, redraw, tokens

RMS: Tree = {"kind": "rms", "eps": 1e-5}
LAYER: Tree = {"kind": "layer", "bias": False}
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
NAMES = {
    "model.layers": "blocks", "input_layernorm": "attention_residual.norm", "post_attention_layernorm": "ffn_residual.norm",
    "self_attn.attn_sub_norm": "attention.inner_norm", "self_attn": "attention", "mlp.ffn_sub_norm": "ffn.inner_norm", "mlp": "ffn",
    "_proj": "", "model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head",
}  # fmt: skip


def ours(name: str) -> str:
    for there, here in NAMES.items():
        name = name.replace(there, here)
    return name


@pytest.mark.usefixtures("doubles")
def test_a_model_is_bitnet_forward_and_backward() -> None:
    heads = {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "inner_norm": RMS}
    ffn = {"kind": "mlp", "activation": "relu2", "hidden": 40, "inner_norm": RMS}
    model = random_model(model_config(BASE | {"norm": RMS, "attention": heads, "ffn": ffn, "head": {"tied": False}}))
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    there = BitNetForCausalLM(BitNetConfig(**SIZES, num_key_value_heads=2, rope_parameters=rope, hidden_act="relu2", rms_norm_eps=1e-5))
    there = there.double().eval()
    with torch.no_grad():
        for name, p in there.named_parameters():
            p.copy_(model.get_parameter(ours(name)))
    assert len([*there.parameters()]) == len([*model.parameters()])
    ids, to = tokens(2, 17), torch.randn(2, 17, 61)
    out, expected = model(ids), there(ids).logits
    assert out.std() > 1
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    (out * to).sum().backward()
    (expected * to).sum().backward()
    for name, p in there.named_parameters():
        assert p.grad is not None
        size = float(p.grad.abs().max())
        torch.testing.assert_close(model.get_parameter(ours(name)).grad, p.grad, rtol=1e-9, atol=1e-9 * size, msg=name)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("gated", [True, False])
@torch.no_grad()
def test_it_is_a_norm_of_what_the_last_matrix_reads(gated: bool) -> None:
    """NormFormer, arXiv:2110.09456, eq. 3: W2 LN(act(W1 x)). Heads: W_o LN(concatenated heads), Magneto, arXiv:2210.06423, section 2.2."""

    def normed(x: Tensor, module: Any) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * module.inner_norm.weight

    x, cfg = torch.randn(2, 9, 32), {"hidden": 40, "activation": "gelu", "gated": gated, "bias": True}
    mlp = MLPConfig(**cfg, inner_norm=LayerNormConfig(bias=False)).build(32, 0)
    redraw_all(mlp)
    inner = F.gelu(mlp.gate(x)) * mlp.up(x) if gated else F.gelu(mlp.up(x))
    torch.testing.assert_close(mlp(x, Context.alone(x)), mlp.down(normed(inner, mlp)), rtol=1e-9, atol=1e-9)

    heads = {"n_heads": 4, "out_gate": "head" if gated else "none"}
    layer, plain = (GQAConfig(**heads, inner_norm=each).build(RMSNormConfig(), 32, 0) for each in (LayerNormConfig(bias=False), None))
    redraw_all(layer)
    weights = layer.state_dict()
    del weights["inner_norm.weight"]
    plain.load_state_dict(weights | {"o.weight": torch.eye(32)})
    read = plain(x, Context.alone(x))
    torch.testing.assert_close(layer(x, Context.alone(x)), layer.o(normed(read, layer)), rtol=1e-9, atol=1e-9)


def redraw_all(module: torch.nn.Module) -> None:
    for p in module.parameters():
        torch.nn.init.ones_(p)
    redraw(module)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ffn": {"kind": "mlp", "inner_norm": RMS | {"place": "post"}}}, r"ffn: inner_norm\.place=post is of norms around"),
        ({"attention": {"kind": "gqa", "n_heads": 4, "inner_norm": RMS | {"place": "sandwich"}}}, "inner_norm.place=sandwich"),
        ({"ffn": {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": {"kind": "mlp", "inner_norm": RMS}}}, "Set expert.inner_norm=null"),
    ],
)
def test_it_is_refused_where_it_has_no_place(changes: Tree, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_config(BASE | changes)


@pytest.mark.parametrize("slot", [{"ffn": {"kind": "mlp"}}, {"attention": {"kind": "gqa", "n_heads": 4}}], ids=str)
def test_ranks_that_hold_slices_and_families_of_transformers_have_no_place_for_it(slot: Tree) -> None:
    cfg = model_config(BASE | {name: options | {"inner_norm": LAYER} for name, options in slot.items()})
    assert "inner_norm is of" in str(cfg.why_not_tensor_parallel(2))
    with pytest.raises(ConfigError, match="inner_norm"):
        family_for(cfg)
