"""HunYuan, dense and with experts."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.hunyuan_v1_dense import FAMILY  # noqa: E402
from lm.hf.families.hunyuan_v1_moe import FAMILY as MOE  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.nn.position.rope import RopeConfig  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
ALPHA = {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "a base that alpha stretches": {"rope_parameters": ALPHA},
    "biases, tied, yarn, whose factor the norms undo": {
        "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 6,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32},
    },
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"num_experts": 5, "moe_topk": 2, "rope_parameters": ALPHA},
    "experts, told for each layer, biases, tied": {
        "num_experts": 4, "moe_topk": [3, 3, 3], "attention_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu",
    },
}  # fmt: skip
SIZES: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.1, "attention_head_dim": 128, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "mlp_bias": False, "model_type": "hunyuan_v1_dense",
    "num_attention_heads": 32, "num_experts": 1, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0, "tie_word_embeddings": False, "use_cla": False, "use_qk_norm": True, "vocab_size": 128167,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_hunyuan(case: str, tmp_path: Path) -> None:
    verify(transformers.HunYuanDenseV1ForCausalLM(transformers.HunYuanDenseV1Config(**BASE | CASES[case])), tmp_path)


def test_keys_that_its_class_does_nothing_by_are_known() -> None:
    """In the spelling of transformers 4; the context of the 7B is reached by a base of 11 million."""
    cfg = FAMILY.config(SIZES)
    assert unheard("config.json", SIZES, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    assert isinstance(cfg.position, RopeConfig) and cfg.position.scaling is None
    assert cfg.position.theta == pytest.approx(11158839.92)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}])
def test_hunyuan_of_transformers_4(more: dict[str, Any]) -> None:
    old_spelling_agrees(FAMILY, transformers.HunYuanDenseV1Config, BASE | more)


@pytest.mark.parametrize("case", cases(EXPERTS))
def test_hunyuan_with_experts(case: str, tmp_path: Path) -> None:
    verify(transformers.HunYuanMoEV1ForCausalLM(transformers.HunYuanMoEV1Config(**BASE | EXPERTS[case])), tmp_path)


def test_the_config_of_the_a13b_is_understood() -> None:
    """Lists of a number for each layer, of which transformers reads that of chosen experts alone."""
    layers = {"moe_topk": 8, "moe_intermediate_size": 3072, "num_shared_expert": 1, "moe_layer_num_skipped": 0}
    there = SIZES | {key: [value] * 32 if value else 0 for key, value in layers.items()}
    there |= {"intermediate_size": 3072, "model_type": "hunyuan_v1_moe", "num_experts": 64, "use_mixed_mlp_moe": True}
    cfg = MOE.config(there)
    assert unheard("config.json", there, MOE, cfg) == [] and MOE.homeless(cfg) == []
    with pytest.raises(ConfigError, match=r"moe_topk=\[8, 4, .* is not the same in all layers"):
        MOE.config(there | {"moe_topk": [8, 4] * 16})
    with pytest.raises(ConfigError, match=r"moe_intermediate_size=\[1, .* is not intermediate_size"):
        MOE.config(there | {"moe_intermediate_size": [1] * 32})
