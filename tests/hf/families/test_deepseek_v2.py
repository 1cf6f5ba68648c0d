"""DeepSeek-V2."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.deepseek_v2 import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.nn.ffn.moe import MoEConfig  # noqa: E402
from lm.nn.mixers.mla import MLAConfig  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 5, "num_key_value_heads": 5, "q_lora_rank": 14, "kv_lora_rank": 18, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 9, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "max_position_embeddings": 128, "routed_scaling_factor": 1.7,
    "topk_method": "group_limited_greedy", "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0,
    "mscale": 0.7, "mscale_all_dim": 1.3,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "groups": {},
    "as in the small one: no query latent, no groups, yarn": {
        "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "rope_parameters": YARN,
    },
    "biases, experts everywhere, tied": {"attention_bias": True, "first_k_dense_replace": 0, "tie_word_embeddings": True},
}  # fmt: skip
LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_deepseek_v2(case: str, tmp_path: Path) -> None:
    verify(transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**BASE | CASES[case])), tmp_path)


def test_a_config_of_published_sizes_is_understood() -> None:
    """The sizes of DeepSeek-V2-Lite in the spelling of transformers 4, with keys of its own code that change nothing."""
    cfg = FAMILY.config(LITE)
    assert isinstance(cfg.ffn, MoEConfig) and (cfg.ffn.n_experts, cfg.ffn.top_k, cfg.ffn.n_shared, cfg.ffn.first_dense) == (64, 6, 2, 1)
    assert isinstance(cfg.attention, MLAConfig) and cfg.attention.q_rank is None and cfg.attention.scale is not None
    assert unheard("config.json", LITE, FAMILY, cfg) == ["config.json: not used: aux_loss_alpha=0.001, seq_aux=True"]
    assert FAMILY.homeless(cfg) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not known. Known are greedy and group_limited_greedy."),
        ({"n_shared_experts": 0}, "n_shared_experts=0 has no form in transformers"),
        ({"kv_lora_rank": 9}, "kv_lora_rank=9 is odd, and transformers rotates what stands behind an even number only"),
        ({"qk_nope_head_dim": 7}, "qk_nope_head_dim=7 is odd"),
        ({"topk_group": 5}, "router.top_groups=5 is over router.n_groups=4"),
    ],
)
def test_what_the_class_does_not_compute_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FAMILY.config({**BASE, **change})


def test_weights_that_sum_to_one_are_not_of_this_family() -> None:
    cfg = FAMILY.config(BASE)
    assert isinstance(cfg.ffn, MoEConfig)
    summed = cfg.replace(ffn=cfg.ffn.replace(router=cfg.ffn.router.replace(normalize=True)))
    assert FAMILY.homeless(summed) == ["model.ffn.router.normalize=true must be false"]
