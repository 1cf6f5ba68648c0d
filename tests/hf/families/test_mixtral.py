"""Mixtral."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.hf.families.mixtral import FAMILY  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128, "num_local_experts": 5, "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "two of five": {},
    "window, three of four, tied": {"sliding_window": 11, "num_local_experts": 4, "num_experts_per_tok": 3, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_mixtral(case: str, tmp_path: Path) -> None:
    verify(transformers.MixtralForCausalLM(transformers.MixtralConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "sliding_window": None, "num_key_value_heads": 4}])
def test_mixtral_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    old_spelling_agrees(FAMILY, transformers.MixtralConfig, sizes | {"num_attention_heads": 8, "max_position_embeddings": 128} | more)
