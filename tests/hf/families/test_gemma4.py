"""Gemma 4, the text model."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

LARGE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 10, "global_head_dim": 16, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
    "max_position_embeddings": 128, "sliding_window": 11, "final_logit_softcapping": 5.0, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
SMALL = LARGE | {
    "num_global_key_value_heads": None, "attention_k_eq_v": False, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "large": LARGE,
    "small": SMALL,
    "experts": LARGE | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 20},
    "small, narrow": SMALL | {"use_double_wide_mlp": False, "num_kv_shared_layers": 2, "tie_word_embeddings": False},
    "no windows": LARGE | {"layer_types": ["full_attention"] * 6, "final_logit_softcapping": None},
    "values of their own": LARGE | {"attention_k_eq_v": False, "attention_bias": True},
    "heads alike": SMALL | {"global_head_dim": 10},
    "keys of others": SMALL | {"num_kv_shared_layers": 2, "global_head_dim": 12, "num_global_key_value_heads": None},
}


@pytest.mark.parametrize("case", cases(CASES, quick=3))
def test_gemma4(case: str, tmp_path: Path) -> None:
    verify(transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**CASES[case])), tmp_path)


PARTS = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")  # which the class of the 12 B lacks
UNIFIED = {name: {key: value for key, value in CASES[name].items() if key not in PARTS} for name in ("large", "keys of others")}


@pytest.mark.parametrize("case", cases(UNIFIED))
def test_gemma4_unified(case: str, tmp_path: Path) -> None:
    verify(transformers.Gemma4UnifiedForCausalLM(transformers.Gemma4UnifiedTextConfig(**UNIFIED[case])), tmp_path)
