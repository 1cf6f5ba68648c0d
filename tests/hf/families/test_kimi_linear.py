"""Kimi Linear."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.kimi_linear import FAMILY  # noqa: E402
from lm.hf.io.check import compare  # noqa: E402
from lm.hf.io.family import resolved  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.io.writing import write_hf  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.nn.mixers.gated_delta import GatedDeltaConfig  # noqa: E402
from lm.testing.models import random_model  # noqa: E402
from tests.hf.harness import VOCAB, cases, change, verify  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 5,
    "num_attention_heads": 5, "num_key_value_heads": 5, "kv_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
    "v_head_dim": 9, "num_local_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "max_position_embeddings": 128,
    "routed_scaling_factor": 1.7, "linear_head_dim": 7, "linear_num_heads": 3, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "as published": {
        "linear_attn_config": {
            "head_dim": 6, "num_heads": 4, "short_conv_kernel_size": 3, "full_attn_layers": [2, 4, 5], "kda_layers": [1, 3],
        },
        "first_k_dense_replace": 2, "q_lora_rank": 14, "attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 2,
    },
    "experts everywhere, no groups": {
        "mlp_layer_types": ["sparse"] * 5, "layer_types": ["full_attention"] + ["linear_attention"] * 4, "n_group": 1, "topk_group": 1,
    },
    "attention alone": {"layer_types": ["full_attention"] * 5},
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304,
    "intermediate_size": 9216, "kv_lora_rank": 512, "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
    },
    "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 1024, "moe_layer_freq": 1,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256,
    "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1, "use_grouped_topk": True,
    "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
"""The keys of Kimi-Linear-48B-A3B's own file, in its spelling."""


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_kimi_linear(case: str, tmp_path: Path) -> None:
    verify(transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**SIZES | deepcopy(CASES[case]))), tmp_path)


def test_the_published_file_is_understood() -> None:
    cfg = FAMILY.config(PUBLISHED)
    there = transformers.KimiLinearConfig(**deepcopy(PUBLISHED)).to_dict()
    assert resolved(FAMILY.config(there)) == resolved(cfg)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    assert isinstance(cfg.recurrent, GatedDeltaConfig) and cfg.recurrent.channels and cfg.position.kind == "none"
    assert [layer + 1 for layer, kind in enumerate(cfg.pattern) if kind == "attention"] == [4, 8, 12, 16, 20, 24, 27]
    again = FAMILY.hf(cfg)
    assert {key: again[key] for key in PUBLISHED if key in again} == {key: value for key, value in PUBLISHED.items() if key in again}
    assert PUBLISHED.keys() - again.keys() == {"head_dim", "num_nextn_predict_layers", "rope_scaling", "rope_theta"}


def test_class_defaults_are_those_of_transformers() -> None:
    needed = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")}
    there = transformers.KimiLinearConfig(**needed).to_dict()
    assert resolved(FAMILY.config(needed)) == resolved(FAMILY.config(there))


def test_the_names_of_the_published_dense_layers_and_of_transformers_are_read(tmp_path: Path) -> None:
    """Transformers 5 writes `block_sparse_moe` for them, and reads both."""
    transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**SIZES)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    renamed = {key.replace("layers.0.block_sparse_moe", "layers.0.mlp"): tensor for key, tensor in stored.items()}
    assert len(renamed.keys() - stored.keys()) == 3
    theirs = read_hf(tmp_path).weights
    save_file(renamed, file)
    published = read_hf(tmp_path).weights
    assert published.keys() == theirs.keys() and all((published[name] == tensor).all() for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"mla_use_nope": False}, "mla_use_nope=False has no place"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax' has no place"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is of the convolutions too"),
        ({"layer_types": None, "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2, 3]}}, "each of the layers 1 to 5"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"]}, "are not dense ones first"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True has no place"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 has no place"),
    ],
)
def test_what_it_does_not_compute_is_refused_by_name(keys: dict[str, Any], told: str, tmp_path: Path) -> None:
    transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**SIZES)).save_pretrained(tmp_path)
    change(tmp_path, **keys)
    with pytest.raises(ConfigError, match=told):
        read_hf(tmp_path)


def test_an_export_without_a_layer_that_attends_is_checked(tmp_path: Path) -> None:
    """Seen to fail: transformers' class asks a cache for its length, which only layers that attend know."""
    cfg = FAMILY.config(
        transformers.KimiLinearConfig(**SIZES | {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}).to_dict()
    )
    model = random_model(cfg)
    write_hf(tmp_path, FAMILY, cfg, dict(model.named_parameters()), None)
    found = compare(tmp_path, FAMILY, model)
    assert found.difference < 1e-3 * found.spread
