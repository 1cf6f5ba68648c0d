"""Qwen3.5, dense and with experts, text alone."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.qwen3_5 import FAMILY as DENSE  # noqa: E402
from lm.hf.families.qwen3_5_moe import FAMILY as MOE  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

ROPE = {"rope_type": "default", "rope_theta": 500.0}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6,
    "linear_value_head_dim": 10, "rope_parameters": ROPE,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "num_experts": 5, "num_experts_per_tok": 2,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "three to one": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}},
    "half of each head rotates, biases, a head of keys for each of values, tied": {
        "layer_types": ["full_attention", "linear_attention"] * 2, "attention_bias": True, "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 3, "tie_word_embeddings": True, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
    },
    "attention alone": {"layer_types": ["full_attention"] * 4},
}  # fmt: skip
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {"": (DENSE, {"intermediate_size": 72}), "Moe": (MOE, EXPERTS)}
PUBLISHED: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "hidden_size": 2048, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "num_attention_heads": 16, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "rope_type": "default",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", cases(CASES))
def test_qwen3_5(case: str, kind: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"Qwen3_5{kind}TextConfig")(**SIZES | KINDS[kind][1] | CASES[case])
    found = verify(getattr(transformers, f"Qwen3_5{kind}ForCausalLM")(config), tmp_path)
    assert found.family is KINDS[kind][0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "full_attention_interval": 2}])
def test_qwen3_5_of_transformers_4(kind: str, more: dict[str, Any]) -> None:
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")}
    config = getattr(transformers, f"Qwen3_5{kind}TextConfig")
    old_spelling_agrees(KINDS[kind][0], config, sizes | KINDS[kind][1] | {"num_attention_heads": 8} | more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_of_published_sizes_is_understood(kind: str) -> None:
    family, sizes = KINDS[kind]
    cfg = family.config(PUBLISHED | sizes)
    assert unheard("config.json", PUBLISHED | sizes, family, cfg) == [] and family.homeless(cfg) == []


@pytest.mark.parametrize(("key", "value"), [("mlp_only_layers", [0]), ("decoder_sparse_step", 2)])
def test_what_qwen3_next_has_and_this_has_not_is_refused_by_name(key: str, value: Any) -> None:
    said = PUBLISHED | EXPERTS | {key: value}
    with pytest.raises(ConfigError, match=f"{key}=.* means something in .*, and model_type=qwen3_5_moe_text does not know it"):
        unheard("config.json", said, MOE, MOE.config(said))
