"""Youtu-LLM."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.hf.families.youtu import FAMILY  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8,
    "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "latent queries, tied": {},
    "plain queries, biases, untied, halves rotated, yarn": {
        "q_lora_rank": None, "tie_word_embeddings": False, "rope_interleave": False, "attention_bias": True, "rope_parameters": YARN,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_youtu(case: str, tmp_path: Path) -> None:
    verify(transformers.YoutuForCausalLM(transformers.YoutuConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 1600000.0, "q_lora_rank": None, "tie_word_embeddings": False}])
def test_youtu_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    old_spelling_agrees(FAMILY, transformers.YoutuConfig, sizes | {"max_position_embeddings": 128} | more)


def test_a_config_of_the_sizes_of_its_class_is_understood() -> None:
    there = transformers.YoutuConfig().to_dict()
    cfg = FAMILY.config(there)
    assert unheard("config.json", there, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    assert family_for(cfg) is not None and family_for(cfg).name == "youtu"
