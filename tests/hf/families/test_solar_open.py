"""Solar Open."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.solar_open import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "moe_intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
    "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 64}},
    "groups, biases, two shared, tied": {
        "attention_bias": True, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "tie_word_embeddings": True,
        "routed_scaling_factor": 1.7, "norm_topk_prob": False,
    },
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["SolarOpenForCausalLM"], "first_k_dense_replace": 0, "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 10240, "max_position_embeddings": 131072, "model_type": "solar_open", "moe_intermediate_size": 1280,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 8, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
    "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 65536, "type": "yarn"}, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False, "vocab_size": 196608,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_solar_open(case: str, tmp_path: Path) -> None:
    verify(transformers.SolarOpenForCausalLM(transformers.SolarOpenConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "n_routed_experts": 16, "head_dim": 16}])
def test_solar_open_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")}
    old_spelling_agrees(FAMILY, transformers.SolarOpenConfig, sizes | {"num_attention_heads": 8} | more)


def test_the_config_of_the_100b_is_understood() -> None:
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("first_k_dense_replace", 2, "first_k_dense_replace=2 means something in"),
        ("use_qk_norm", True, "use_qk_norm=True means something in"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor=0.5 means nothing in solar_open"),
    ],
)
def test_what_has_no_place_is_refused_by_name(key: str, value: Any, said: str) -> None:
    hf = PUBLISHED | {key: value}
    with pytest.raises(ConfigError, match=said):
        unheard("config.json", hf, FAMILY, FAMILY.config(hf))
