"""StarCoder 2."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.hf.families.starcoder2 import FAMILY  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "norm_epsilon": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "no window": {"num_key_value_heads": 6},
    "window": {"sliding_window": 11},
    "no biases, untied, another activation": {
        "use_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "relu",
        "num_key_value_heads": 1,
        "sliding_window": 2,
    },
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}, "head_dim": 10},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_starcoder2(case: str, tmp_path: Path) -> None:
    verify(transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "sliding_window": 11, "hidden_act": "gelu", "num_key_value_heads": 4}])
def test_starcoder2_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    old_spelling_agrees(FAMILY, transformers.Starcoder2Config, sizes | {"num_attention_heads": 8, "max_position_embeddings": 128} | more)
