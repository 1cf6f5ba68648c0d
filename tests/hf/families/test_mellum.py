"""Mellum 2."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.mellum import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.hf.options.windows import FULL, SLIDING  # noqa: E402
from lm.nn.position.rope import RopeConfig  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "num_experts": 5, "num_experts_per_tok": 2,
    "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
ROPES = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 90.0}}
CASES: dict[str, dict[str, Any]] = {
    "windows, two bases, a scaling": {"sliding_window": 7, "layer_types": [SLIDING, FULL] * 2, "rope_parameters": ROPES},
    "no windows, a dense layer, biases, tied": {
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "attention_bias": True, "tie_word_embeddings": True,
        "norm_topk_prob": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_mellum(case: str, tmp_path: Path) -> None:
    verify(transformers.MellumForCausalLM(transformers.MellumConfig(**BASE | CASES[case])), tmp_path)


def test_a_config_of_the_sizes_of_its_class_is_understood() -> None:
    there = transformers.MellumConfig(layer_types=[SLIDING, SLIDING, SLIDING, FULL] * 7).to_dict()
    cfg = FAMILY.config(there)
    assert unheard("config.json", there, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    assert isinstance(cfg.position, RopeConfig) and (cfg.position.theta, cfg.position.local_theta) == (5e5, 1e4)


def test_a_part_of_each_head_is_refused_in_either_kind_of_layer() -> None:
    for kind in ROPES:
        ropes = ROPES | {kind: ROPES[kind] | {"partial_rotary_factor": 0.5}}
        with pytest.raises(ConfigError, match=r"partial_rotary_factor=0\.5 .*means nothing in"):
            FAMILY.config(BASE | {"rope_parameters": ropes})
