"""EXAONE 3."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", minversion="5.24")

from lm.hf.families.exaone import FAMILY  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 70, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama3 scaling": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "biases, tied, gelu": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu", "head_dim": 10},
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "activation_function": "silu", "architectures": ["ExaoneForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "embed_dropout": 0.0, "eos_token_id": 361, "head_dim": 128, "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "layer_norm_epsilon": 1e-05, "max_position_embeddings": 32768, "model_type": "exaone", "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_layers": 32, "pad_token_id": 0, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "torch_dtype": "float32", "use_cache": True, "vocab_size": 102400,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_exaone(case: str, tmp_path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.ExaoneConfig(**BASE | CASES[case]))
    verify(theirs, tmp_path, loads_as="LlamaForCausalLM")


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "num_layers": 5, "activation_function": "gelu", "layer_norm_epsilon": 0.1}])
def test_exaone_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")}
    old_spelling_agrees(FAMILY, transformers.ExaoneConfig, sizes | {"num_layers": 3, "num_attention_heads": 8} | more)


def test_the_config_of_the_7b_is_understood() -> None:
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    assert family_for(cfg).name == "llama", "what every program loads"
