"""Nemotron-H and Nemotron 3: layers of one sublayer, of which some are Mamba-2, some feed-forwards or experts."""

import re
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.nemotron_h import FAMILY  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.nn.ffn.moe import MoEConfig  # noqa: E402
from lm.nn.mixers.mamba2 import Mamba2Config  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

MAMBA, ATTENDS = "linear_attention", "full_attention"
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 40,
    "mamba_num_heads": 4, "mamba_head_dim": 10, "n_groups": 2, "ssm_state_size": 6, "chunk_size": 8, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 28, "max_position_embeddings": 128,
    "time_step_min": 1e-30,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "experts that read latents": {
        "layers_block_type": [MAMBA, "moe", MAMBA, "moe", ATTENDS, "moe"], "moe_latent_size": 16, "routed_scaling_factor": 2.5,
    },
    "dense": {"layers_block_type": [MAMBA, "mlp", MAMBA, "mlp", MAMBA, ATTENDS, "mlp", MAMBA]},
    "dense layers first, groups of experts, weights as they are, other activation": {
        "layers_block_type": ["mlp", ATTENDS, "mlp", MAMBA, "moe", "moe"], "n_group": 3, "topk_group": 2, "norm_topk_prob": False,
        "mlp_hidden_act": "silu", "use_conv_bias": False, "layer_norm_epsilon": 1e-3, "conv_kernel": 3,
    },
    "attention and feed-forwards with biases": {"layers_block_type": [ATTENDS, "mlp"] * 2, "mlp_bias": True},
    "two feed-forwards in a row": {"layers_block_type": [MAMBA, "mlp", "mlp", ATTENDS]},
}  # fmt: skip
NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "chunk_size": 128,
    "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "initializer_range": 0.02,
    "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64,
    "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1, "n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2, "num_logits_to_keep": 1,
    "pad_token_id": 0, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True, "residual_in_fp32": False, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1, "use_bias": False,
    "use_cache": True, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip
"""Nemotron 3 Nano 30B-A3B."""


@pytest.mark.parametrize("case", cases(CASES))
def test_nemotron_h(case: str, tmp_path: Path) -> None:
    found = verify(transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**BASE | CASES[case])), tmp_path)
    assert found.family.name == family_for(found.config).name == "nemotron_h"


def test_steps_have_a_least_one(tmp_path: Path) -> None:
    """Of whole texts alone, in transformers. Seen to fail without it, and with another one."""
    sizes = BASE | {"layers_block_type": [MAMBA, "mlp", ATTENDS, MAMBA], "time_step_min": 0.4}
    found = verify(transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**sizes)), tmp_path, greedy=False)
    assert isinstance(found.config.recurrent, Mamba2Config) and found.config.recurrent.step_floor == 0.4


def test_a_config_of_published_sizes_is_understood() -> None:
    cfg = FAMILY.config(NANO)
    assert unheard("config.json", NANO, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == [] and cfg.n_layers == 52
    slots = [cfg.slot(layer) for layer in range(52)]
    assert [layer for layer in range(52) if slots[layer] == "attention"] == [5, 12, 19, 26, 33, 42]
    assert (slots.count("recurrent"), slots.count("ffn")) == (23, 23) and isinstance(cfg.ffn, MoEConfig) and cfg.ffn.dense is None
    older = {key: value for key, value in NANO.items() if key != "hybrid_override_pattern"}
    spelled = older | {"layers_block_type": ["mamba", "moe", "attention", "moe"], "num_hidden_layers": 4}
    assert FAMILY.config(spelled).pattern == ["recurrent", "ffn", "attention", "ffn"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "*EM-"}, "layers_block_type has mlp behind moe, and in lm dense layers come first"),
        ({"mlp_bias": True}, "mlp_bias is of the shared expert alone"),
        ({"layers_block_type": ["mamba", "conv"]}, "layers_block_type has 'conv', and known are linear_attention, full_"),
        ({"layers_block_type": 7}, "layers_block_type=7 does not fit, which has a name for each layer. Restore the file."),
        ({"layers_block_type": ["mamba", ["moe"]]}, "layers_block_type=['mamba', ['moe']] does not fit"),
        ({"hybrid_override_pattern": "M-M-"}, "layers_block_type has no attention, without which transformers does not run"),
        ({"hybrid_override_pattern": "M*M*"}, "block=single has its feed-forwards in layers of their own"),
    ],
)  # fmt: skip
def test_what_has_no_form_in_lm_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        FAMILY.config(NANO | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_shared_experts": 2}, "n_shared_experts=2 has no place in lm's nemotron_h, which has 1"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu' has no place"),
        ({"attention_bias": True}, "attention_bias=True has no place"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True has no place"),
    ],
)
def test_values_that_its_class_does_not_have_are_refused(changes: dict[str, Any], message: str) -> None:
    there = NANO | changes
    with pytest.raises(ConfigError, match=message):
        unheard("config.json", there, FAMILY, FAMILY.config(there))
