"""Qwen2-MoE and Qwen3-Next."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.qwen2_moe import FAMILY as QWEN2_MOE  # noqa: E402
from lm.hf.families.qwen3_next import FAMILY  # noqa: E402
from lm.hf.io.family import resolved  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts": 5,
    "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
QWEN2: dict[str, dict[str, Any]] = {
    "experts everywhere": {},
    "window, no biases, the first dense, tied": {
        "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 0, "qkv_bias": False, "mlp_only_layers": [0],
        "tie_word_embeddings": True, "norm_topk_prob": True,
    },
}  # fmt: skip
NEXT: dict[str, dict[str, Any]] = {
    "three to one": {},
    "half of each head rotates, biases, a dense layer between, a head of keys for each of values": {
        "layer_types": ["full_attention", "linear_attention"] * 2, "attention_bias": True, "decoder_sparse_step": 2,
        "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True, "norm_topk_prob": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
    "attention alone": {"layer_types": ["full_attention"] * 4},
}  # fmt: skip


@pytest.mark.parametrize("case", cases(QWEN2, quick=0))
def test_qwen2_moe(case: str, tmp_path: Path) -> None:
    verify(transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**SIZES | QWEN2[case])), tmp_path)


@pytest.mark.parametrize("windows", [{"use_sliding_window": True, "sliding_window": 11}, {"sliding_window": 11, "max_window_layers": 3}])
def test_without_layer_types_every_second_layer_of_qwen2_moe_has_a_window(windows: dict[str, Any]) -> None:
    """As in transformers. Seen to fail: no layer had one, as in Qwen2 and Qwen3, whose windows begin at max_window_layers."""
    there = transformers.Qwen2MoeConfig(**SIZES | windows).to_dict()
    cfg = QWEN2_MOE.config(SIZES | windows)
    assert resolved(cfg) == resolved(QWEN2_MOE.config(there))
    assert (cfg.attention.window, cfg.attention.global_every) == ((11, 2) if windows.get("use_sliding_window") else (None, None))
    with pytest.raises(ConfigError, match="is not a window in all layers but every n-th"):
        QWEN2_MOE.config(SIZES | {"use_sliding_window": True, "max_window_layers": 2})


@pytest.mark.parametrize("case", cases(NEXT))
def test_qwen3_next(case: str, tmp_path: Path) -> None:
    sizes = SIZES | {
        "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    }  # fmt: skip
    verify(transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**sizes | NEXT[case])), tmp_path)


def test_a_window_has_no_place_in_qwen3_next() -> None:
    """Seen to fail: it was written as Qwen3-MoE's, and transformers' class attended to all."""
    there = transformers.Qwen3NextConfig(**SIZES, head_dim=8, layer_types=["full_attention"] * 4).to_dict()
    cfg = FAMILY.config(there)
    assert FAMILY.homeless(cfg) == []
    windowed = cfg.replace(attention=cfg.attention.replace(window=11))
    assert FAMILY.homeless(windowed) == ["model.attention.window=11 must be null"]


def test_as_many_heads_of_keys_as_of_values_are_a_number_there() -> None:
    """Seen to fail: null was written, and transformers' class takes a number only."""
    there = transformers.Qwen3NextConfig(**SIZES, head_dim=8, linear_num_key_heads=4, linear_num_value_heads=4).to_dict()
    cfg = FAMILY.config(there)
    assert cfg.recurrent is not None
    null = cfg.replace(recurrent=cfg.recurrent.replace(n_k_heads=None))
    assert FAMILY.homeless(null) == [] and FAMILY.hf(null)["linear_num_key_heads"] == 4
