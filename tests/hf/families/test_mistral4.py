"""Mistral Small 4."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.mistral4 import FAMILY  # noqa: E402
from lm.hf.io.family import resolved  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0,
    "mscale": 0.7, "mscale_all_dim": 1.3, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 5, "num_key_value_heads": 5, "q_lora_rank": 14, "kv_lora_rank": 18, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 9, "n_routed_experts": 7, "num_experts_per_tok": 3, "max_position_embeddings": 128,
    "pad_token_id": None, "rope_parameters": YARN,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "biases, halves, the first dense, weights that do not sum to 1": {
        "attention_bias": True, "rope_interleave": False, "first_k_dense_replace": 1, "norm_topk_prob": False, "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
    },
    "no query latent, tied, another scaling": {
        "q_lora_rank": None, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "linear", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.3,
        },
    },
    "no growth": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.0}},
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_mistral4(case: str, tmp_path: Path) -> None:
    theirs = transformers.Mistral4ForCausalLM(transformers.Mistral4Config(**deepcopy(BASE | CASES[case])))
    assert (resolved(verify(theirs, tmp_path).config).get("attention.query_growth.rate") is None) == (case == "no growth")


def test_a_config_of_the_sizes_of_its_class_is_understood() -> None:
    there = transformers.Mistral4Config().to_dict()
    cfg = FAMILY.config(there)
    assert unheard("config.json", there, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    assert family_for(cfg).name == "mistral4"
    bare = {key: there[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")}
    assert resolved(FAMILY.config(bare)) == resolved(cfg)


@pytest.mark.parametrize(("still", "turned"), [(14, 30), (35, 12), (128, 64)])
def test_all_of_the_shared_key_is_told_to_turn_where_the_part_is_no_round_number(still: int, turned: int) -> None:
    """14 + 30 numbers times 30 / 44 are less than 30, by which transformers would turn 29."""
    cfg = FAMILY.config(BASE)
    there = FAMILY.hf(cfg.replace(attention=cfg.attention.tree() | {"nope_dim": still, "rope_dim": turned}))
    theirs = transformers.Mistral4Config(**there)
    assert int(theirs.head_dim * theirs.rope_parameters["partial_rotary_factor"]) == turned
    assert resolved(FAMILY.config(there))["attention.rope_dim"] == turned


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"n_group": 2, "topk_group": 1}, "n_group=2: groups are chosen by their two best experts, .* Import another model"),
        (
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.5}},
            "rope_type='default': without a scaling transformers rotates whole heads, .* Correct it",
        ),
        ({"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 of 16 is not qk_rope_head_dim=6"),
        (
            {"rope_parameters": {key: value for key, value in YARN.items() if key != "llama_4_scaling_beta"}},
            "llama_4_scaling_beta is missing",
        ),
    ],
)
def test_what_it_does_not_compute_is_refused_by_name(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FAMILY.config(BASE | keys)
