"""ERNIE 4.5, dense."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.hf.families.ernie4_5 import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, biases, another width of heads": {"tie_word_embeddings": False, "use_bias": True, "head_dim": None, "num_key_value_heads": 3},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_ernie4_5(case: str, tmp_path: Path) -> None:
    verify(transformers.Ernie4_5ForCausalLM(transformers.Ernie4_5Config(**BASE | CASES[case])), tmp_path)


def test_a_config_of_published_sizes_is_understood() -> None:
    """The sizes of the 0.3B in the spelling of transformers 4."""
    there = {
        "architectures": ["Ernie4_5ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131072, "model_type": "ernie4_5",
        "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2, "pad_token_id": 0, "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0, "rope_scaling": None, "tie_word_embeddings": True, "use_bias": False, "use_cache": True,
        "vocab_size": 103424,
    }  # fmt: skip
    cfg = FAMILY.config(there)
    assert unheard("config.json", there, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
