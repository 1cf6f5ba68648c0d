"""Llama."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "grouped": {"rope_parameters": DEFAULT},
    "biases, tied": {
        "rope_parameters": DEFAULT,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 6,
    },
    "llama3 rope": {"rope_parameters": LLAMA3, "num_key_value_heads": 1},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    "dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 9.0, "original_max_position_embeddings": 16}},
    "yarn rope": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_llama(case: str, tmp_path: Path) -> None:
    verify(transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE | CASES[case])), tmp_path)
