"""Hy3."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.hy_v3 import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "num_experts": 8, "num_experts_per_tok": 3,
    "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "no dense layer, biases, two shared, tied": {
        "mlp_layer_types": ["sparse"] * 3, "attention_bias": True, "num_shared_experts": 2, "tie_word_embeddings": True,
        "router_scaling_factor": 1.5, "hidden_act": "gelu",
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_hy3(case: str, tmp_path: Path) -> None:
    verify(transformers.HYV3ForCausalLM(transformers.HYV3Config(**BASE | CASES[case])), tmp_path)


def test_a_config_of_the_sizes_of_its_class_is_understood() -> None:
    there = transformers.HYV3Config().to_dict()
    cfg = FAMILY.config(there)
    assert unheard("config.json", there, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []


def test_dense_layers_that_are_not_the_first_ones_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mlp_layer_types=\['sparse', 'dense', 'sparse'\] are not dense ones first"):
        FAMILY.config(BASE | {"mlp_layer_types": ["sparse", "dense", "sparse"]})
