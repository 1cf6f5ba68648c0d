"""OLMoE."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.olmoe import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts": 5, "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "weights as they are": {},
    "weights that sum to 1, biases, tied": {
        "norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None, "hidden_act": "gelu",
    },
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None, "eos_token_id": 50279,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096,
    "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "vocab_size": 50304,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_olmoe(case: str, tmp_path: Path) -> None:
    verify(transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "num_experts": 16, "norm_topk_prob": True, "num_key_value_heads": 4}])
def test_olmoe_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    old_spelling_agrees(FAMILY, transformers.OlmoeConfig, sizes | {"num_attention_heads": 8, "max_position_embeddings": 128} | more)


def test_the_config_of_the_1b_7b_is_understood() -> None:
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []


@pytest.mark.parametrize("key, value", [("clip_qkv", 8.0), ("head_dim", 64)])
def test_what_has_no_place_is_refused_by_name(key: str, value: float) -> None:
    said = PUBLISHED | {key: value}
    with pytest.raises(ConfigError, match=f"{key}={value}"):
        unheard("config.json", said, FAMILY, FAMILY.config(said))
