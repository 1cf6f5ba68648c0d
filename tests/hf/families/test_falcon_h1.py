"""Falcon-H1: attention and Mamba-2 side by side in each layer, with factors on all of it."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.falcon_h1 import FAMILY  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.nn.block import SequentialConfig  # noqa: E402
from lm.nn.mixers.mamba2 import Mamba2Config  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "mamba_d_ssm": 60, "mamba_n_heads": 4, "mamba_d_state": 6,
    "mamba_chunk_size": 8, "mamba_n_groups": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
FACTORS: dict[str, Any] = {
    "lm_head_multiplier": 0.6, "embedding_multiplier": 1.7, "mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.8,
    "attention_out_multiplier": 1.2, "attention_in_multiplier": 0.9, "ssm_multipliers": [0.6, 1.4, 0.8, 1.5, 0.7],
    "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.9,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "all factors, other heads": {**FACTORS, "head_dim": 10},
    "no factors, tied, no bias of the convolution": {"tie_word_embeddings": True, "mamba_conv_bias": False, "mamba_d_conv": 3},
    "a norm behind the gate, a width that is told by another key, biases, stretched": {
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": None, "attention_bias": True, "mlp_bias": True,
        "rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}, "key_multiplier": 0.5,
        "mlp_multipliers": [0.7, 1.3],
    },
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375, "attn_layer_indices": None, "bos_token_id": 1, "embedding_multiplier": 5.656854249492381,
    "eos_token_id": 11, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 2048,
    "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4,
    "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24,
    "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False, "mamba_use_mlp": True,
    "max_position_embeddings": 16384, "mlp_bias": False, "mlp_expansion_factor": 8, "mlp_multipliers": [0.8838834764831845, 0.5859375],
    "model_type": "falcon_h1", "num_attention_heads": 8, "num_hidden_layers": 36, "num_key_value_heads": 2, "num_logits_to_keep": 1,
    "pad_token_id": 0, "projectors_bias": False, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 32784,
}  # fmt: skip
"""Falcon-H1-0.5B, in the spelling of transformers 4."""


@pytest.mark.parametrize("case", cases(CASES))
def test_falcon_h1(case: str, tmp_path: Path) -> None:
    found = verify(transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**BASE | CASES[case])), tmp_path)
    assert found.family.name == family_for(found.config).name == "falcon_h1" and found.config.pattern == ["both"]


def test_falcon_h1_of_transformers_4() -> None:
    old_spelling_agrees(FAMILY, transformers.FalconH1Config, PUBLISHED)


def test_a_config_of_published_sizes_is_understood() -> None:
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    assert isinstance(cfg.recurrent, Mamba2Config) and not cfg.recurrent.gated_norm and cfg.recurrent.head_dim == 64
    assert cfg.recurrent.input_scales == pytest.approx([1.25 * scale for scale in PUBLISHED["ssm_multipliers"]])
    assert isinstance(cfg.block, SequentialConfig) and (cfg.block.attention_scale, cfg.block.ffn_scale) == (0.9375, 0.5859375)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate has no form in lm, where the gate comes first"),
        ({"attention_in_multiplier": 0.5, "attention_bias": True}, "attention_in_multiplier=0.5 beside attention_bias has no form in lm"),
        ({"mamba_d_head": 32}, "24 heads of mamba_d_head=32 are not mamba_d_ssm=1536 wide"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is of the convolutions too"),
        ({"time_step_limit": [0.0, 0.5]}, "time_step_limit=.* limits what no option of lm does"),
    ],
)
def test_what_has_no_form_in_lm_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FAMILY.config(PUBLISHED | changes)
