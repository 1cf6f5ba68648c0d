"""ERNIE 4.5 with experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.ernie4_5_moe import FAMILY  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2,
    "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "the first dense, tied": {},
    "every second layer, none shared, untied": {
        "moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_num_shared_experts": 0, "tie_word_embeddings": False, "moe_k": 3,
    },
    "experts everywhere": {"moe_layer_start_index": 0, "moe_layer_end_index": 3, "head_dim": 10},
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 2560,
    "intermediate_size": 12288, "max_position_embeddings": 131072, "model_type": "ernie4_5_moe", "moe_intermediate_size": 1536, "moe_k": 6,
    "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
    "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4, "num_nextn_predict_layers": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False, "use_cache": True,
    "vocab_size": 103424,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_ernie4_5_moe(case: str, tmp_path: Path) -> None:
    verify(transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 300.0, "moe_layer_interval": 2, "moe_num_experts": 16, "use_bias": False}])
def test_ernie4_5_moe_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    old_spelling_agrees(FAMILY, transformers.Ernie4_5_MoeConfig, sizes | {"num_attention_heads": 8, "max_position_embeddings": 128} | more)


def test_a_config_of_published_sizes_is_understood() -> None:
    """The sizes of the 21B."""
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []


@pytest.mark.parametrize("key, value", [("use_bias", True), ("moe_norm_min", 0.1), ("moe_layer_end_index", 20)])
def test_what_has_no_place_is_refused_by_name(key: str, value: Any) -> None:
    said = PUBLISHED | {key: value}
    with pytest.raises(ConfigError, match=f"{key}={value}"):
        unheard("config.json", said, FAMILY, FAMILY.config(said))


def test_blocks_for_further_tokens_are_left_out_and_the_correction_bias_stays_float32(tmp_path: Path) -> None:
    model = transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**BASE))
    model.save_pretrained(tmp_path)
    file, bias = tmp_path / "model.safetensors", "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    stored = {key: tensor.bfloat16() for key, tensor in load_file(file).items()}
    stored |= {bias: 1 + torch.rand(1, 6) / 1000, "model.mtp_linear_proj.0.weight": torch.ones(3, 3)}
    save_file(stored, file)
    found = read_hf(tmp_path).weights
    assert found["blocks.1.ffn.router.weight"].dtype == torch.bfloat16
    assert torch.equal(found["blocks.1.ffn.router.correction_bias"], stored[bias][0])
