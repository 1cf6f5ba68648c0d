"""Jamba: Mamba with norms within, attention without positions, and experts in every n-th layer."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.jamba import FAMILY  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.nn.ffn.moe import MoEConfig  # noqa: E402
from lm.nn.mixers.mamba import MambaConfig  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 5,
    "mamba_d_state": 6,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "experts in every other layer": {},
    "no experts, tied, another width, rank, kernel and epsilon": {
        "num_experts": 1, "tie_word_embeddings": True, "mamba_expand": 3, "mamba_dt_rank": 5, "mamba_d_conv": 3, "rms_norm_eps": 1e-2,
        "mamba_conv_bias": False, "attn_layer_period": 2, "attn_layer_offset": 0, "head_dim": 10,
    },
    "experts in all layers, attention in all, another activation": {
        "expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 1, "attn_layer_offset": 0, "hidden_act": "gelu",
        "num_experts_per_tok": 1,
    },
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"], "attention_dropout": 0.0, "attn_layer_offset": 4, "attn_layer_period": 8, "bos_token_id": 1,
    "calc_logits_for_entire_prompt": False, "eos_token_id": 2, "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "mamba_conv_bias": True, "mamba_d_conv": 4,
    "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_inner_layernorms": True, "mamba_proj_bias": False,
    "model_type": "jamba", "n_ctx": 262144, "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "output_router_logits": False, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_mamba_kernels": True, "vocab_size": 65536,
}  # fmt: skip
"""Jamba-v0.1, in the spelling of transformers 4."""


@pytest.mark.parametrize("case", cases(CASES))
def test_jamba(case: str, tmp_path: Path) -> None:
    found = verify(transformers.JambaForCausalLM(transformers.JambaConfig(**BASE | CASES[case])), tmp_path)
    assert found.family.name == family_for(found.config, imported="jamba").name == "jamba"


def test_a_config_of_published_sizes_is_understood() -> None:
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    assert isinstance(cfg.recurrent, MambaConfig) and cfg.recurrent.inner_weight and cfg.recurrent.width == 8192
    assert [layer for layer in range(32) if cfg.slot(layer) == "attention"] == [4, 12, 20, 28] and isinstance(cfg.ffn, MoEConfig)
    assert [layer for layer in range(8) if not cfg.ffn.is_dense(layer)] == [1, 3, 5, 7] and not cfg.ffn.router.normalize


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_layer_offset": 0}, "expert_layer_offset=0 of expert_layer_period=2 is not the last layer of these"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is of the convolutions too"),
        ({"num_hidden_layers": 4}, "attn_layer_offset=4 is of no layer of 4, and transformers does not run so"),
    ],
)
def test_what_has_no_form_in_lm_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FAMILY.config(PUBLISHED | changes)
