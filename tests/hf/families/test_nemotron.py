"""Nemotron."""

from pathlib import Path
from typing import Any

import pytest

from lm.hf.families.nemotron import FAMILY

transformers = pytest.importorskip("transformers")

from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WHOLE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "biases, tied, wide heads that rotate whole": {
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 10, "rope_parameters": WHOLE, "norm_eps": 1e-3,
        "hidden_act": "silu", "num_key_value_heads": 6,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_nemotron(case: str, tmp_path: Path) -> None:
    verify(transformers.NemotronForCausalLM(transformers.NemotronConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "partial_rotary_factor": 0.25, "head_dim": 16}])
def test_nemotron_of_transformers_4(more: dict[str, Any]) -> None:
    old_spelling_agrees(FAMILY, transformers.NemotronConfig, BASE | more)
