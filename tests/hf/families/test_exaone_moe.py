"""K-EXAONE."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.exaone_moe import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.hf.options.windows import FULL, SLIDING  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 5,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "num_experts": 8, "num_experts_per_tok": 3,
    "max_position_embeddings": 128, "sliding_window": 7, "layer_types": [SLIDING, SLIDING, SLIDING, FULL, SLIDING],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "two dense layers": {"first_k_dense_replace": 2},
    "no dense layer, a window in every layer, groups, two shared, tied": {
        "first_k_dense_replace": 0, "layer_types": [SLIDING] * 5, "n_group": 4, "topk_group": 2,
        "num_shared_experts": 2, "tie_word_embeddings": True, "norm_topk_prob": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_exaone_moe(case: str, tmp_path: Path) -> None:
    verify(transformers.ExaoneMoeForCausalLM(transformers.ExaoneMoeConfig(**BASE | CASES[case])), tmp_path)


def test_a_config_of_published_sizes_is_understood() -> None:
    """K-EXAONE 236B's."""
    there = {
        "architectures": ["ExaoneMoeForCausalLM"], "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 6144, "intermediate_size": 18432, "is_moe_layer": [False] + [True] * 47,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 12, "max_position_embeddings": 262144, "model_type": "exaone_moe",
        "moe_intermediate_size": 2048, "n_group": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
        "num_shared_experts": 1, "rms_norm_eps": 1e-05, "rope_theta": 1000000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "sliding_window": 128, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
        "vocab_size": 153600,
    }  # fmt: skip
    cfg = FAMILY.config(there)
    assert unheard("config.json", there, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    with pytest.raises(ConfigError, match="are not dense ones first"):
        FAMILY.config(there | {"mlp_layer_types": ["sparse"] * 47 + ["dense"]})
    with pytest.raises(ConfigError, match="layers without a window do not rotate"):
        FAMILY.config(there | {"layer_types": [FULL] * 48})
