"""Sarvam 105B."""

import json
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", minversion="5.24")

from lm.hf.families.sarvam_mla import FAMILY  # noqa: E402
from lm.hf.io.family import resolved, without  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, logits_agree, old_spelling_agrees, ours_of, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 5, "num_key_value_heads": 5, "kv_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 9,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
YARN = {"factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.3}
CASES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **YARN}},
    "query latent, biases, groups, tied": {
        "q_lora_rank": 14, "attention_bias": True, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_sarvam_mla(case: str, tmp_path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.SarvamMLAConfig(**BASE | CASES[case]))
    verify(theirs, tmp_path, loads_as="DeepseekV3ForCausalLM")


def test_keys_as_the_published_file_spells_them(tmp_path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.SarvamMLAConfig(**BASE | CASES["yarn"])).eval()
    theirs.save_pretrained(tmp_path)
    cfg = read_hf(tmp_path).config
    file = tmp_path / "config.json"
    hf = {key.replace("n_routed", "num").replace("n_shared", "num_shared"): value for key, value in json.loads(file.read_text()).items()}
    theirs_too = {"head_dim": 24, "q_head_dim": 16, "rope_theta": 500.0, "rope_scaling": {"type": "deepseek_yarn", **YARN}}
    file.write_text(json.dumps({**without(hf, "rope_parameters"), **theirs_too}))
    found = read_hf(tmp_path)
    assert resolved(found.config) == resolved(cfg) and {"num_experts", "num_shared_experts"} <= hf.keys()
    logits_agree(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), ours_of(found), spread=0.0)


@pytest.mark.parametrize("more", [{}, {"rope_scaling": {"type": "deepseek_yarn", **YARN}, "first_k_dense_replace": 2}])
def test_sarvam_mla_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")} | {"num_hidden_layers": 5}
    old = {"max_position_embeddings": 128, "rope_theta": 500.0, "num_key_value_heads": 5}
    old_spelling_agrees(FAMILY, transformers.SarvamMLAConfig, sizes | old | more)


def test_the_config_of_transformers_defaults_is_understood() -> None:
    there = transformers.SarvamMLAConfig().to_dict()
    cfg = FAMILY.config(there)
    assert unheard("config.json", there, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
