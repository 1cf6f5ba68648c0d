"""OLMo 2."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.hf.families.olmo2 import FAMILY  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "biases, tied": {"num_key_value_heads": 6, "attention_bias": True, "tie_word_embeddings": True},
    "a head of another width": {"head_dim": 10, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_olmo2(case: str, tmp_path: Path) -> None:
    verify(transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "num_key_value_heads": 4, "rms_norm_eps": 1e-6}])
def test_olmo2_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    old_spelling_agrees(FAMILY, transformers.Olmo2Config, sizes | {"num_attention_heads": 8, "max_position_embeddings": 128} | more)
