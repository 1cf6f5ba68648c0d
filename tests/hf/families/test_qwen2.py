"""Qwen2."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.hf.families.qwen2 import FAMILY  # noqa: E402
from tests.hf.harness import VOCAB, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "no window": {},
    "windows everywhere, tied": {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 0, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("case", ["no window", pytest.param("windows everywhere, tied", marks=pytest.mark.slow)])
def test_qwen2(case: str, tmp_path: Path) -> None:
    verify(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "num_key_value_heads": 4}, {"use_sliding_window": True}])
def test_qwen2_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "intermediate_size", "num_hidden_layers")} | {"hidden_size": 64}
    old_spelling_agrees(FAMILY, transformers.Qwen2Config, sizes | {"num_attention_heads": 32, "max_position_embeddings": 128} | more)
