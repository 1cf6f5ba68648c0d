"""Sarvam 30B."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", minversion="5.24")

from lm.hf.families.sarvam_moe import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "norms on heads": {},
    "biases, groups, two shared, tied, no norms on heads": {
        "attention_bias": True, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "tie_word_embeddings": True, "use_qk_norm": False,
        "routed_scaling_factor": 1.7, "norm_topk_prob": False, "first_k_dense_replace": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_sarvam_moe(case: str, tmp_path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.SarvamMoEConfig(**BASE | CASES[case]))
    verify(theirs, tmp_path, loads_as="Glm4MoeForCausalLM")


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "n_routed_experts": 16, "head_dim": 16, "use_qk_norm": False}])
def test_sarvam_moe_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")}
    old_spelling_agrees(FAMILY, transformers.SarvamMoEConfig, sizes | {"num_attention_heads": 8} | more)


def test_the_config_of_transformers_defaults_is_understood() -> None:
    there = transformers.SarvamMoEConfig().to_dict()
    cfg = FAMILY.config(there)
    assert unheard("config.json", there, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
