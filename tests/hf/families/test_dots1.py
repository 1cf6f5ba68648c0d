"""dots.llm1."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.dots1 import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.7, "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "the first dense": {"head_dim": 10},
    "a window in every second layer, groups, biases, tied": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 11, "n_group": 4, "topk_group": 2,
        "attention_bias": True, "tie_word_embeddings": True, "first_k_dense_replace": 0,
    },
    "a window in all layers, weights as they are": {"max_window_layers": 0, "sliding_window": 9, "norm_topk_prob": False},
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["Dots1ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1, "hidden_size": 4096,
    "intermediate_size": 10944, "max_position_embeddings": 32768, "model_type": "dots1", "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
    "num_hidden_layers": 62, "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000,
    "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "vocab_size": 152064,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_dots1(case: str, tmp_path: Path) -> None:
    verify(transformers.Dots1ForCausalLM(transformers.Dots1Config(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "max_window_layers": 0, "sliding_window": 7, "norm_topk_prob": True}])
def test_dots1_of_transformers_4(more: dict[str, Any]) -> None:
    needed = ("vocab_size", "num_hidden_layers", "max_position_embeddings", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
    sizes = {key: BASE[key] for key in needed} | {"hidden_size": 64, "num_attention_heads": 32}
    old_spelling_agrees(FAMILY, transformers.Dots1Config, sizes | more)


@pytest.mark.parametrize("scored", ["noaux_tc", "sigmoid"])
def test_a_config_of_published_sizes_is_understood(scored: str) -> None:
    said = PUBLISHED | {"scoring_func": scored}
    cfg = FAMILY.config(said)
    assert unheard("config.json", said, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []


@pytest.mark.parametrize("key, value", [("scoring_func", "softmax"), ("n_group", None), ("n_shared_experts", 0), ("max_window_layers", 40)])
def test_what_transformers_would_not_compute_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key}={value!r}|{key} is null"):
        FAMILY.config(PUBLISHED | {key: value})
