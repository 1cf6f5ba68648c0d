"""Persimmon."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.hf.families.persimmon import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "norms on heads, half of each rotated": {},
    "no norms on heads, all of each, another activation, tied": {
        "qk_layernorm": False, "hidden_act": "gelu", "tie_word_embeddings": True, "layer_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["PersimmonForCausalLM"], "bos_token_id": 71013, "eos_token_id": 71013, "hidden_act": "relu2", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 16384, "layer_norm_eps": 1e-05, "max_position_embeddings": 16384,
    "model_type": "persimmon", "num_attention_heads": 64, "num_hidden_layers": 36, "qk_layernorm": True, "rope_theta": 25000.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 262144,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_persimmon(case: str, tmp_path: Path) -> None:
    verify(transformers.PersimmonForCausalLM(transformers.PersimmonConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 25000.0, "partial_rotary_factor": 0.25}])
def test_persimmon_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: value for key, value in BASE.items() if key != "rope_parameters"}
    old_spelling_agrees(FAMILY, transformers.PersimmonConfig, sizes | more)


def test_a_config_of_published_sizes_is_understood() -> None:
    """The sizes of the 8B in the spelling of transformers 4."""
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
