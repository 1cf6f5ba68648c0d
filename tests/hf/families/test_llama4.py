"""Llama 4, text alone."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.llama4 import FAMILY  # noqa: E402
from lm.hf.io.family import resolved  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.schema import Tree  # noqa: E402
from lm.storage.reading import read_json  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

SCALED: Tree = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "intermediate_size_mlp": 56, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128, "num_local_experts": 5,
    "num_experts_per_tok": 2, "attention_chunk_size": 11, "floor_scale": 6, "attn_scale": 0.7, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None, "rope_parameters": SCALED,
}  # fmt: skip
WHOLE, CHUNKS = "full_attention", "chunked_attention"
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
CASES: dict[str, dict[str, Any]] = {
    "Scout: chunks and norms where it rotates, growth where not, experts in all layers": {"no_rope_layer_interval": 2},
    "Maverick: no norms, experts in every second layer, no scaling": {
        "use_qk_norm": False, "interleave_moe_layer_step": 2, "rope_parameters": PLAIN, "num_experts_per_tok": 1,
    },
    "experts in the last two layers, biases, tied, no growth": {
        "moe_layers": [2, 3], "attention_bias": True, "tie_word_embeddings": True, "attn_temperature_tuning": False,
    },
    "no chunks": {"layer_types": [WHOLE] * 4, "num_key_value_heads": 6},
    "all rotate, chunks in other layers": {"no_rope_layers": [1] * 4, "layer_types": [WHOLE, CHUNKS, CHUNKS, WHOLE]},
}  # fmt: skip
SCOUT: Tree = {
    "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008], "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760, "model_type": "llama4_text", "no_rope_layers": [], "num_attention_heads": 40,
    "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": False,
    "pad_token_id": 200018, "rms_norm_eps": 1e-05, "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "torch_dtype": "bfloat16", "use_cache": True,
    "use_qk_norm": True, "vocab_size": 202048, "attn_temperature_tuning": 4, "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_llama4(case: str, tmp_path: Path) -> None:
    """Where queries grow, transformers counts the padding before a row among their positions."""
    theirs = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**BASE | CASES[case]))
    grows = resolved(verify(theirs, tmp_path, lefts=_lefts(theirs.config)).config).get("attention.query_growth.rate")
    assert (grows is not None) == _grows(theirs.config)
    for key in ("layer_types", "no_rope_layers", "moe_layers"):
        assert read_json(tmp_path / "exported/config.json")[key] == getattr(theirs.config, key)


def _grows(config: Any) -> bool:
    return config.attn_temperature_tuning and 0 in config.no_rope_layers


def _lefts(config: Any) -> tuple[bool, ...]:
    return (False, False) if _grows(config) else (False, False, True)


def test_a_config_of_scout_is_understood() -> None:
    """In the spelling of transformers 4, as published: attn_temperature_tuning is a number, of which only 0 turns it off."""
    cfg = FAMILY.config(SCOUT)
    assert unheard("config.json", SCOUT, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == [] and family_for(cfg).name == "llama4_text"
    ours = resolved(cfg)
    told = {key: ours[f"attention.{key}"] for key in ("window", "chunked", "global_every", "qk_norm", "query_growth.every")}
    assert told == {"window": 8192, "chunked": True, "global_every": 4, "qk_norm": "l2", "query_growth.every": 8192}
    assert ours["position.none_every"] == 4 and ours["ffn.every"] == 1 and ours.get("ffn.dense.hidden") is None


@pytest.mark.parametrize(
    "more", [{}, {"interleave_moe_layer_step": 2, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}]
)
def test_llama4_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")}
    old_spelling_agrees(FAMILY, transformers.Llama4TextConfig, sizes | {"num_attention_heads": 8} | more)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"no_rope_layers": [1, 0, 0, 1]}, r"no_rope_layers=\[1, 0, 0, 1\] are not 0 in every n-th layer alone"),
        ({"layer_types": [WHOLE, CHUNKS, WHOLE, WHOLE]}, r"layer_types=.* with attention_chunk_size=11 are not chunks in all layers but"),
        ({"layer_types": [WHOLE, "sliding_attention"] * 2}, "layer_types=.* are not chunks in all layers but every"),
        ({"attention_chunk_size": None}, "with attention_chunk_size=None are not chunks"),
        ({"moe_layers": [0, 1]}, r"moe_layers=\[0, 1\] are not every n-th layer"),
        ({"moe_layers": []}, r"moe_layers=\[\] are not every n-th layer"),
    ],
)
def test_other_patterns_of_layers_are_refused_by_name(keys: Tree, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FAMILY.config(BASE | keys)


@pytest.mark.parametrize(
    ("slot", "changes", "message"),
    [
        ("attention", {"chunked": False}, "model.attention.window=11 must be null"),
        (
            "attention",
            {"query_growth": {"rate": 0.7, "every": 6, "first": 0, "unrotated": True}},
            "model.attention.query_growth.first=0 must be 1",
        ),
        ("attention", {"qk_norm": "rotated", "query_growth": None}, "model.attention.qk_norm=rotated must be none"),
        ("ffn", {"weigh_inputs": False}, "model.ffn.weigh_inputs=false must be true"),
        ("ffn", {"n_shared": 2}, "model.ffn.n_shared=2 must be 1"),
    ],
)
def test_what_the_file_has_no_place_for_is_told(slot: str, changes: Tree, message: str) -> None:
    cfg = FAMILY.config(BASE)
    assert message in FAMILY.homeless(cfg.replace(**{slot: getattr(cfg, slot).replace(**changes)}))
