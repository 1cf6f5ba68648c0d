"""DeepSeek-V3."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from lm.errors import CheckpointError, ConfigError  # noqa: E402
from lm.hf.deepseek_v3 import FAMILY  # noqa: E402
from lm.hf.reading import read_hf  # noqa: E402
from tests.hf.harness import VOCAB, old_spelling_agrees, redraw, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 5, "num_key_value_heads": 5, "q_lora_rank": 14, "kv_lora_rank": 18, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 9, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "max_position_embeddings": 128, "routed_scaling_factor": 1.7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0,
    "mscale": 0.7, "mscale_all_dim": 1.3,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "groups": {},
    "no query latent, biases, halves": {"q_lora_rank": None, "attention_bias": True, "rope_interleave": False, "n_shared_experts": 2},
    "query latent with biases": {"attention_bias": True, "norm_topk_prob": False, "tie_word_embeddings": True},
    "yarn": {"rope_parameters": YARN},
    "yarn, one mscale": {"rope_parameters": {key: value for key, value in YARN.items() if key != "mscale"}, "n_group": 1, "topk_group": 1},
    "experts everywhere": {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_deepseek_v3(case: str, tmp_path: Path) -> None:
    verify(transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("scaling", [None, {"type": "yarn", **{key: value for key, value in YARN.items() if not key.startswith("rope")}}])
def test_deepseek_v3_of_transformers_4(scaling: dict[str, Any] | None) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")} | {"num_hidden_layers": 5}
    old = {"max_position_embeddings": 128, "rope_theta": 500, "rope_scaling": scaling, "num_key_value_heads": 5}
    old_spelling_agrees(FAMILY, transformers.DeepseekV3Config, sizes | old)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**BASE)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights, before = load_file(file), read_hf(tmp_path).weights
    save_file(weights | {"model.layers.3.eh_proj.weight": torch.ones(3, 3)}, file)
    assert read_hf(tmp_path).weights.keys() == before.keys()
    save_file(weights | {"model.layers.4.eh_proj.weight": torch.ones(3, 3)}, file)
    with pytest.raises(CheckpointError, match=r"not known.*model\.layers\.4\.eh_proj"):
        read_hf(tmp_path)


def test_the_correction_bias_stays_float32_beside_bf16_matrices(tmp_path: Path) -> None:
    theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**BASE))
    redraw(theirs, 1.0)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    save_file({key: tensor if key.endswith("correction_bias") else tensor.bfloat16() for key, tensor in stored.items()}, file)
    weights = read_hf(tmp_path).weights
    assert weights["blocks.1.ffn.router.weight"].dtype == torch.bfloat16
    assert torch.equal(weights["blocks.1.ffn.router.correction_bias"], stored["model.layers.1.mlp.gate.e_score_correction_bias"])


@pytest.mark.parametrize("key, value", [("n_shared_experts", 0), ("n_group", 8)])
def test_what_transformers_cannot_run_is_refused_by_name(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{key}={value}"):
        FAMILY.config(BASE | {key: value})
