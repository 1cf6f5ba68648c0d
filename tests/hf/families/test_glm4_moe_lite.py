"""GLM-4.7-Flash."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.glm4_moe_lite import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 5, "num_key_value_heads": 5, "q_lora_rank": 14, "kv_lora_rank": 18, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 9, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
    "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0,
    "mscale": 0.7, "mscale_all_dim": 1.3,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "the first dense": {},
    "experts everywhere, groups, biases, halves, tied": {
        "mlp_layer_types": ["sparse"] * 3, "n_group": 4, "topk_group": 2, "attention_bias": True, "rope_interleave": False,
        "tie_word_embeddings": True,
    },
    "two dense, yarn": {"mlp_layer_types": ["dense", "dense", "sparse"], "rope_parameters": YARN},
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8, "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_glm4_moe_lite(case: str, tmp_path: Path) -> None:
    verify(transformers.Glm4MoeLiteForCausalLM(transformers.Glm4MoeLiteConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "mlp_layer_types": ["dense", "dense", "sparse"], "q_lora_rank": None}])
def test_glm4_moe_lite_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")}
    old_spelling_agrees(FAMILY, transformers.Glm4MoeLiteConfig, sizes | {"num_attention_heads": 20} | more)


def test_a_config_of_published_sizes_is_understood() -> None:
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("mlp_layer_types", ["sparse", "dense", "sparse"], r"mlp_layer_types=\['sparse', 'dense', 'sparse'\] are not dense ones and"),
        ("first_k_dense_replace", 2, "first_k_dense_replace=2 has no place in lm's glm4_moe_lite, which has 1"),
    ],
)
def test_what_transformers_would_not_compute_is_refused_by_name(key: str, value: Any, said: str) -> None:
    """It reads mlp_layer_types alone, of which the first layer is dense where the file says nothing."""
    hf = BASE | {key: value}
    with pytest.raises(ConfigError, match=said):
        unheard("config.json", hf, FAMILY, FAMILY.config(hf))
