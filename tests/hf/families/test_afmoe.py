"""Trinity (AFMoE)."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.afmoe import FAMILY  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.hf.options.windows import FULL, SLIDING  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 5,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "num_experts": 8, "num_experts_per_tok": 3,
    "max_position_embeddings": 128, "sliding_window": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as usual": {"num_dense_layers": 2, "route_scale": 2.826, "mup_enabled": True},
    "every second layer whole, no dense layer, tied": {
        "global_attn_every_n_layers": 2, "num_dense_layers": 0, "num_shared_experts": 1, "tie_word_embeddings": True,
    },
    "a window in every layer": {"layer_types": [SLIDING] * 5},
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["AfmoeForCausalLM"], "attention_dropout": 0.0, "global_attn_every_n_layers": 4, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 8, "load_balance_coeff": 0.001, "max_position_embeddings": 131072,
    "model_type": "afmoe", "moe_intermediate_size": 1024, "mup_enabled": True, "n_group": 1, "num_attention_heads": 32,
    "num_dense_layers": 2, "num_expert_groups": 1, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 32,
    "num_key_value_heads": 4, "num_limited_groups": 1, "num_shared_experts": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000, "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048,
    "tie_word_embeddings": False, "topk_group": 1, "use_cache": True, "use_grouped_mm": True, "vocab_size": 200192,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_afmoe(case: str, tmp_path: Path) -> None:
    verify(transformers.AfmoeForCausalLM(transformers.AfmoeConfig(**BASE | CASES[case])), tmp_path)


def test_a_config_of_published_sizes_is_understood() -> None:
    """Trinity-Mini's."""
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    assert family_for(cfg, imported="afmoe").name == "afmoe"


@pytest.mark.parametrize(
    "change, said",
    [
        ({"attention_bias": True}, "attention_bias=True has no place in lm's afmoe"),
        ({"layer_types": [FULL] * 32}, "layers without a window do not rotate"),
        ({"num_shared_experts": 0}, "n_shared_experts=0 has no form"),
    ],
)
def test_what_has_no_place_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        unheard("config.json", PUBLISHED | change, FAMILY, FAMILY.config(PUBLISHED | change))
