"""LFM2, with experts too, LFM3, Granite 4, Bamba and Mamba-2: most layers without attention, or all of them."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.bamba import FAMILY as BAMBA_FAMILY  # noqa: E402
from lm.hf.families.granite_hybrid import FAMILY  # noqa: E402
from lm.hf.io import vllm  # noqa: E402
from lm.hf.io.family import families, resolved  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.nn.mixers.gqa import GQAConfig  # noqa: E402
from lm.nn.mixers.mamba2 import Mamba2Config  # noqa: E402
from lm.nn.transformer import build_model  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 500.0}
LFM2: dict[str, dict[str, Any]] = {
    "three to one": {"layer_types": ["conv", "conv", "conv", "full_attention"], "rope_parameters": ROPE},
    "by numbers, untied, a width that is adjusted": {
        "full_attn_idxs": [1, 2], "tie_word_embeddings": False, "block_auto_adjust_ff_dim": True, "block_multiple_of": 8, "conv_L_cache": 4,
    },
    "attention alone": {"layer_types": ["full_attention"] * 4},
}  # fmt: skip
LFM2_MOE: dict[str, dict[str, Any]] = {
    "two dense layers": {"layer_types": ["conv", "conv", "full_attention", "conv"], "rope_parameters": ROPE},
    "no dense layer, untied, weights as they are and a factor on them": {
        "layer_types": ["full_attention", "conv", "conv", "full_attention"], "num_dense_layers": 0, "tie_word_embeddings": False,
        "norm_topk_prob": False, "routed_scaling_factor": 1.7, "conv_L_cache": 4, "norm_eps": 1e-3,
    },
    "attention alone": {"layer_types": ["full_attention"] * 4, "num_dense_layers": 1},
}  # fmt: skip
LFM3: dict[str, dict[str, Any]] = {
    "as the class has it": {},
    "neither gates nor norms behind, biases, bases, untied": {
        "use_attention_gate": False, "use_sandwich_norm": False, "attention_bias": True, "tie_word_embeddings": False, "conv_L_cache": 3,
        "norm_eps": 1e-3, "rope_parameters": {"full_attention": ROPE, "sliding_attention": {**ROPE, "rope_theta": 50.0}},
    },
    "a quarter turns, one base for both": {
        "rope_parameters": {
            "full_attention": {**ROPE, "rope_type": "proportional", "partial_rotary_factor": 0.25}, "sliding_attention": ROPE,
        },
        "layer_types": ["sliding_attention", "conv", "conv", "full_attention", "conv", "sliding_attention", "sliding_attention"],
    },
    "windows alone": {"layer_types": ["conv", "sliding_attention"] * 3 + ["conv"]},
    "attention alone": {"layer_types": ["full_attention"] * 7},
}  # fmt: skip
MAMBA = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
GRANITE: dict[str, dict[str, Any]] = {
    "no positions": {"layer_types": MAMBA},
    "rotated, groups, tied": {
        "layer_types": MAMBA, "position_embedding_type": "rope", "rope_parameters": ROPE, "mamba_n_groups": 2,
        "mamba_conv_bias": False, "attention_bias": True, "tie_word_embeddings": True, "mamba_d_conv": 3, "rms_norm_eps": 1e-5,
    },
    "experts": {"layer_types": MAMBA, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20},
    "attention alone": {"layer_types": ["full_attention"] * 4},
}  # fmt: skip
BAMBA: dict[str, dict[str, Any]] = {
    "half rotated": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    "wholly rotated and stretched, groups, tied, biases": {
        "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0}, "mamba_n_groups": 2,
        "mamba_conv_bias": False, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "mamba_d_conv": 3,
        "rms_norm_eps": 1e-6, "attn_layer_indices": [0, 3],
    },
    "attention alone": {"attn_layer_indices": [0, 1, 2, 3]},
}  # fmt: skip
MAMBA2: dict[str, dict[str, Any]] = {
    "one group, tied": {"tie_word_embeddings": True, "n_groups": 1},
    "groups, other widths, no bias of the convolution": {
        "num_heads": 6, "head_dim": 24, "expand": 3, "n_groups": 3, "conv_kernel": 3, "use_conv_bias": False, "layer_norm_epsilon": 1e-3,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cases(LFM2))
def test_lfm2(case: str, tmp_path: Path) -> None:
    sizes = SIZES | {"intermediate_size": 72, "block_auto_adjust_ff_dim": False} | LFM2[case]
    verify(transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes)), tmp_path)


@pytest.mark.parametrize("case", cases(LFM2_MOE))
def test_lfm2_with_experts(case: str, tmp_path: Path) -> None:
    sizes = SIZES | {"intermediate_size": 72, "moe_intermediate_size": 20, "num_experts": 5, "num_experts_per_tok": 2} | LFM2_MOE[case]
    verify(transformers.Lfm2MoeForCausalLM(transformers.Lfm2MoeConfig(**sizes)), tmp_path)


def lfm3(**changes: Any) -> Any:
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    sizes = SIZES | {"num_hidden_layers": 7, "intermediate_size": 72, "head_dim": 12, "sliding_window": 11} | tokens
    return transformers.Lfm3Config(**deepcopy(sizes | changes))


@pytest.mark.parametrize("case", cases(LFM3, quick=2))
def test_lfm3(case: str, tmp_path: Path) -> None:
    verify(transformers.Lfm3ForCausalLM(lfm3(**LFM3[case])), tmp_path)


def test_what_lfm3s_class_takes_where_the_file_says_nothing_is_read() -> None:
    """All defaults, and one base of both kinds of layers that are given without one."""
    family = families()["lfm3"]
    there = lfm3(num_hidden_layers=9).to_dict()
    named = {"model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
             "max_position_embeddings", "intermediate_size", "sliding_window"}  # fmt: skip
    bare = {key: value for key, value in there.items() if key in named}
    assert resolved(family.config(bare)) == resolved(family.config(there))
    said = "whether it has Lfm3ForCausalLM and computes the same was not checked"
    assert vllm.serve(family, resolved(family.config(there)), Path("out"))[1] == said
    assert [kind for kind in there["layer_types"] if kind != "conv"] == ["full_attention", "sliding_attention"] * 2
    ropes: dict[str, Any] = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    for more in ({}, {"rope_theta": 700.0}):
        found = family.config(bare | {"rope_parameters": deepcopy(ropes)} | more)
        assert resolved(found) == resolved(family.config(lfm3(num_hidden_layers=9, rope_parameters=ropes, **more).to_dict()))


def test_an_adapter_of_lfm3_is_of_the_modules_that_transformers_builds() -> None:
    """Seen to fail: a gate is called gate_proj in the file and g_proj there, and peft left its adapter out."""
    family, model = families()["lfm3"], transformers.Lfm3ForCausalLM(lfm3(tie_word_embeddings=False))
    cfg = family.config(model.config.to_dict())
    names = dict(build_model(cfg, device="meta").named_parameters()).keys()
    built = {path for pair in family.built_pairs(resolved(cfg)) if pair.ours[0] in names for path in pair.theirs}
    assert built == model.state_dict().keys()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"attention_bias": True}, "attention_bias=True is not of the gate here, and of all of attention in lm"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling stands for rope_parameters in lfm3. Move it there"),
        ({"layer_types": ["conv", "conv", "chunked_attention"] * 3}, "layer_types has 'chunked_attention'"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 7}, "is not a window in all layers but every n-th"),
        (
            {"rope_parameters": {"full_attention": {**ROPE, "partial_rotary_factor": 0.5}}},
            "partial_rotary_factor=0.5 means nothing in lfm3",
        ),
    ],
)
def test_an_lfm3_that_has_no_form_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        families()["lfm3"].config(lfm3(num_hidden_layers=9).to_dict() | keys)


def test_lfm2_with_experts_of_published_sizes_is_understood_and_without_their_bias_refused() -> None:
    """LFM2-8B-A1B, in the spelling of transformers 4."""
    types = ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]
    there = {
        "architectures": ["Lfm2MoeForCausalLM"], "conv_L_cache": 3, "conv_bias": False, "hidden_size": 2048, "intermediate_size": 7168,
        "layer_types": types, "max_position_embeddings": 128000, "model_type": "lfm2_moe", "moe_intermediate_size": 1792, "norm_eps": 1e-05,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "use_expert_bias": True,
        "vocab_size": 65536,
    }  # fmt: skip
    family = families()["lfm2_moe"]
    cfg = family.config(there)
    assert unheard("config.json", there, family, cfg) == [] and family.homeless(cfg) == []
    with pytest.raises(ConfigError, match="use_expert_bias=False has no place in lm's lfm2_moe"):
        unheard("config.json", there | {"use_expert_bias": False}, family, cfg)
    with pytest.raises(ConfigError, match="'layer_types' is missing, and lfm2_moe needs it"):
        family.config({key: value for key, value in there.items() if key != "layer_types"})


@pytest.mark.parametrize("case", cases(GRANITE, quick=3))
def test_granite_hybrid(case: str, tmp_path: Path) -> None:
    sizes = SIZES | {
        "num_local_experts": 0, "shared_intermediate_size": 40, "mamba_n_heads": 4, "mamba_d_state": 6, "mamba_chunk_size": 8,
        "embedding_multiplier": 1.7, "attention_multiplier": 0.21, "residual_multiplier": 0.6, "logits_scaling": 1.6,
    }  # fmt: skip
    verify(transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**sizes | GRANITE[case])), tmp_path)


@pytest.mark.parametrize("case", cases(BAMBA))
def test_bamba(case: str, tmp_path: Path) -> None:
    sizes = SIZES | {
        "intermediate_size": 40, "mamba_n_heads": 4, "mamba_d_state": 6, "mamba_chunk_size": 8, "attn_layer_indices": [2],
    }  # fmt: skip
    verify(transformers.BambaForCausalLM(transformers.BambaConfig(**sizes | BAMBA[case])), tmp_path)


@pytest.mark.parametrize("case", cases(MAMBA2, quick=0))
def test_mamba2(case: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 4, "num_heads": 4, "head_dim": 24, "n_groups": 2}
    sizes |= {"state_size": 6, "chunk_size": 8} | MAMBA2[case]
    found = verify(transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes)), tmp_path)
    trained = found.config.replace(attention=GQAConfig(n_heads=4))  # of which no layer has any
    assert family_for(trained).name == "mamba2"


def test_a_mamba2_of_published_sizes_is_understood() -> None:
    """The 130M, and what it may not say otherwise."""
    there = {
        "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4, "eos_token_id": 0, "expand": 2,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 768, "initializer_range": 0.1, "layer_norm_epsilon": 1e-05,
        "model_type": "mamba2", "n_groups": 1, "norm_before_gate": True, "num_heads": 24, "num_hidden_layers": 24, "pad_token_id": 0,
        "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True, "state_size": 128, "tie_word_embeddings": True,
        "time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001,
        "time_step_rank": 48, "use_bias": False, "use_cache": True, "use_conv_bias": True, "vocab_size": 50288,
    }  # fmt: skip
    family = families()["mamba2"]
    cfg = family.config(there)
    assert unheard("config.json", there, family, cfg) == [] and family.homeless(cfg) == []
    with pytest.raises(ConfigError, match="24 heads of head_dim=32 must be as wide as expand=2 times hidden_size=768"):
        family.config({**there, "head_dim": 32})


@pytest.mark.parametrize("config", [transformers.Mamba2Config, transformers.BambaConfig, transformers.GraniteMoeHybridConfig])
def test_steps_that_have_limits_are_refused(config: Any) -> None:
    """Seen to fail: Bamba and Granite came in as if they had none, and answered otherwise."""
    there = config(num_local_experts=0, time_step_limit=[0.0, 0.5]).to_dict()
    with pytest.raises(ConfigError, match=r"time_step_limit=\[0.0, 0.5\] limits what no option of lm does"):
        families()[there["model_type"]].config(there)


def test_a_bamba_of_published_sizes_is_understood() -> None:
    """The sizes of the 9B in the spelling of transformers 4."""
    there = {
        "architectures": ["BambaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "attn_layer_indices": [9, 18, 27],
        "attn_rotary_emb": 64, "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False,
        "max_position_embeddings": 262144, "mlp_bias": False, "model_type": "bamba", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 128001, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 128256,
    }  # fmt: skip
    cfg = BAMBA_FAMILY.config(there)
    assert isinstance(cfg.recurrent, Mamba2Config) and cfg.recurrent.state_dim == 128 and cfg.position.tree()["fraction"] == 0.5
    assert [layer for layer in range(32) if cfg.slot(layer) == "attention"] == [9, 18, 27]
    bare = BAMBA_FAMILY.config({name: value for name, value in there.items() if name != "rms_norm_eps"})
    assert isinstance(bare.recurrent, Mamba2Config) and bare.recurrent.eps == bare.norm.eps == 1e-5
    assert unheard("config.json", there, BAMBA_FAMILY, cfg) == [] and BAMBA_FAMILY.homeless(cfg) == []


def test_published_granite_4_spells_its_layers_otherwise(tmp_path: Path) -> None:
    """As ibm-granite/granite-4.0-h-350m has it: names of transformers 4, heads of a width that is told as auto."""
    there = {
        "model_type": "granitemoehybrid", "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
        "layer_types": ["mamba", "mamba", "attention"], "position_embedding_type": "nope", "num_local_experts": 0, "mamba_n_heads": 4,
        "mamba_d_head": "auto", "max_position_embeddings": 128, "num_experts_per_tok": 0, "normalization_function": "rmsnorm",
    }  # fmt: skip
    cfg = FAMILY.config(there)
    assert (
        isinstance(cfg.recurrent, Mamba2Config) and cfg.recurrent.head_dim == 24 and cfg.pattern == ["recurrent", "recurrent", "attention"]
    )
    assert unheard("config.json", there, FAMILY, cfg) == []
    experts = there | {"num_local_experts": 8, "num_experts_per_tok": 3}
    assert unheard("config.json", experts, FAMILY, FAMILY.config(experts)) == []
    with pytest.raises(ConfigError, match="layer_types has 'rwkv'"):
        FAMILY.config({**there, "layer_types": ["mamba", "rwkv", "attention"]})
