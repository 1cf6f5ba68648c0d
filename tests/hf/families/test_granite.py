"""Granite."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.hf.families.granite import FAMILY  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128, "embedding_multiplier": 1.7,
    "attention_multiplier": 0.21, "residual_multiplier": 0.6, "logits_scaling": 1.6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "four factors": {},
    "biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None},
    "whole factors, llama3 rope": {
        "embedding_multiplier": 3,
        "residual_multiplier": 2,
        "logits_scaling": 1,
        "rope_parameters": LLAMA3,
        "num_key_value_heads": 1,
    },
}


@pytest.mark.parametrize("case", cases(CASES))
def test_granite(case: str, tmp_path: Path) -> None:
    verify(transformers.GraniteForCausalLM(transformers.GraniteConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "logits_scaling": 8.0, "num_key_value_heads": 2}])
def test_granite_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    old_spelling_agrees(FAMILY, transformers.GraniteConfig, sizes | {"num_attention_heads": 4, "max_position_embeddings": 128} | more)
