"""Qwen3."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.qwen3 import FAMILY  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 11}
CASES: dict[str, dict[str, Any]] = {
    "no window": {},
    "windows everywhere, biases": {**WINDOW, "max_window_layers": 0, "attention_bias": True},
    "windows in all but the second, tied": {
        **WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("case", cases(CASES))
def test_qwen3(case: str, tmp_path: Path) -> None:
    verify(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize(
    "more", [{}, {"rope_theta": 500.0, "num_key_value_heads": 4}, {"use_sliding_window": True}, WINDOW | {"max_window_layers": 0}]
)
def test_qwen3_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    old_spelling_agrees(FAMILY, transformers.Qwen3Config, sizes | {"num_attention_heads": 32, "max_position_embeddings": 128} | more)


IRREGULAR: list[dict[str, Any]] = [
    {"max_window_layers": 2},
    {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    {"layer_types": ["sliding_attention", "sliding_attention"]},
]


@pytest.mark.parametrize("more", IRREGULAR)
def test_windows_in_other_layers_are_refused_by_name(more: dict[str, Any]) -> None:
    [(key, value)] = more.items()
    with pytest.raises(ConfigError) as raised:
        FAMILY.config(BASE | WINDOW | more)
    assert f"{key}={value!r}" in str(raised.value)
