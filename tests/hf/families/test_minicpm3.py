"""MiniCPM3."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.hf.families.minicpm3 import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 6, "max_position_embeddings": 128, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8, "dim_model_base": 24, "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "no factors, biases, no low-rank queries, other values, yarn, untied": {
        "scale_emb": 1, "scale_depth": None, "dim_model_base": None, "attention_bias": True, "mlp_bias": True, "q_lora_rank": None,
        "v_head_dim": 10, "tie_word_embeddings": False, "rope_parameters": YARN,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_minicpm3(case: str, tmp_path: Path) -> None:
    verify(transformers.MiniCPM3ForCausalLM(transformers.MiniCPM3Config(**BASE | CASES[case])), tmp_path)


def test_a_config_of_published_sizes_is_understood() -> None:
    """MiniCPM3-4B's."""
    factors = [1.0 + i / 16 for i in range(16)]
    there = {
        "architectures": ["MiniCPM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "dim_model_base": 256,
        "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 6400, "kv_lora_rank": 256, "max_position_embeddings": 32768,
        "model_type": "minicpm3", "num_attention_heads": 40, "num_hidden_layers": 62, "num_key_value_heads": 40, "q_lora_rank": 768,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-05, "scale_depth": 1.4, "scale_emb": 12,
        "rope_scaling": {"type": "longrope", "long_factor": factors, "short_factor": factors, "original_max_position_embeddings": 32768},
        "vocab_size": 73448,
    }  # fmt: skip
    cfg = FAMILY.config(there)
    assert unheard("config.json", there, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
