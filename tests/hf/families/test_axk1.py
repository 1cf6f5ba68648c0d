"""A.X K1."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.axk1 import FAMILY  # noqa: E402
from lm.hf.io.family import resolved  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 5, "num_key_value_heads": 5, "q_lora_rank": 14, "kv_lora_rank": 18, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 9, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "max_position_embeddings": 128, "routed_scaling_factor": 1.7, "rms_norm_eps": 1e-3, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "biases, halves, experts everywhere, tied": {
        "attention_bias": True, "rope_interleave": False, "mlp_layer_types": ["sparse"] * 3, "tie_word_embeddings": True,
        "norm_topk_prob": False, "n_shared_experts": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_axk1(case: str, tmp_path: Path) -> None:
    verify(transformers.AXK1ForCausalLM(transformers.AXK1Config(**BASE | CASES[case])), tmp_path)


def test_a_config_of_the_sizes_of_its_class_is_understood() -> None:
    there = transformers.AXK1Config().to_dict()
    cfg = FAMILY.config(there)
    assert unheard("config.json", there, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    bare = {key: there[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")}
    assert resolved(FAMILY.config({**bare, "first_k_dense_replace": 1, "moe_layer_freq": 1})) == resolved(cfg)


def test_published_files_have_no_correction_bias_and_norms_that_nothing_reads(tmp_path: Path) -> None:
    transformers.AXK1ForCausalLM(transformers.AXK1Config(**BASE)).save_pretrained(tmp_path)
    file, unread = tmp_path / "model.safetensors", "model.layers.0.post_mlp_layernorm.weight"
    stored = {key: tensor for key, tensor in load_file(file).items() if not key.endswith("e_score_correction_bias")}
    assert unread not in stored and "model.layers.1.post_mlp_layernorm.weight" in stored
    save_file(stored | {unread: torch.ones(48)}, file)
    found = read_hf(tmp_path)
    assert not found.weights["blocks.1.ffn.router.correction_bias"].any() and "blocks.0.ffn.out_norm.weight" not in found.weights
    assert torch.equal(found.weights["blocks.2.ffn.out_norm.weight"], stored["model.layers.2.post_mlp_layernorm.weight"])


@pytest.mark.parametrize(
    ("keys", "told"),
    [({"q_lora_rank": None}, "q_lora_rank is null"), ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "are not dense ones first")],
)
def test_what_it_does_not_compute_is_refused_by_name(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FAMILY.config(BASE | keys)
