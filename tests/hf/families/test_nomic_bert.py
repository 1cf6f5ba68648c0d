"""Encoders like BERT whose positions rotate: Nomic BERT, Jina Embeddings v3 and RoFormer."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.io.family import families, resolved  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import LENGTH, VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 100,
    "max_position_embeddings": LENGTH,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 500.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nomic": ("NomicBert", {}),
    "jina": ("JinaEmbeddingsV3", {"rope_parameters": ROPE}),
    "nomic, another width of heads, three segments": (
        "NomicBert", {"head_dim": 10, "hidden_act": "gelu", "type_vocab_size": 3, "layer_norm_eps": 1e-3, "rope_parameters": ROPE},
    ),
    "jina, relu, two segments": ("JinaEmbeddingsV3", {"hidden_act": "relu", "type_vocab_size": 2}),
    "roformer": ("RoFormer", {}),
    "nomic, stretched": ("NomicBert", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
    "roformer, relu, three segments": ("RoFormer", {"hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-3}),
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "nomic_bert": {
        "architectures": ["NomicBertForMaskedLM"], "attention_probs_dropout_prob": 0.0, "head_dim": 64, "hidden_act": "silu",
        "hidden_dropout_prob": 0.0, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
        "max_position_embeddings": 2048, "model_type": "nomic_bert", "num_attention_heads": 12, "num_hidden_layers": 12,
        "pad_token_id": 0, "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"}, "type_vocab_size": 2, "vocab_size": 30528,
    },
    "jina_embeddings_v3": {
        "architectures": ["JinaEmbeddingsV3ForMaskedLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "eos_token_id": 2,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 4096,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 8194, "model_type": "jina_embeddings_v3", "num_attention_heads": 16,
        "num_hidden_layers": 24, "pad_token_id": 1, "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"},
        "tie_word_embeddings": True, "type_vocab_size": 1, "use_cache": True, "vocab_size": 250002,
    },
    "roformer": {
        "architectures": ["RoFormerForMaskedLM"], "attention_probs_dropout_prob": 0.1, "embedding_size": 768, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
        "max_position_embeddings": 1536, "model_type": "roformer", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0,
        "rotary_value": False, "type_vocab_size": 2, "use_cache": True, "vocab_size": 50000,
    },
}  # fmt: skip
OWN: dict[str, Any] = {
    "activation_function": "swiglu", "attn_pdrop": 0.0, "causal": False, "embd_pdrop": 0.0, "layer_norm_epsilon": 1e-12,
    "mlp_fc1_bias": False, "mlp_fc2_bias": False, "model_type": "nomic_bert", "n_embd": 768, "n_head": 12, "n_inner": 3072,
    "n_layer": 12, "n_positions": 2048, "parallel_block": False, "prenorm": False, "qkv_proj_bias": False, "resid_pdrop": 0.0,
    "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None, "type_vocab_size": 2, "use_rms_norm": False, "vocab_size": 30528,
}  # fmt: skip
"""The same sizes under the names that Nomic's own code has for them."""


@pytest.mark.parametrize("case", cases(CASES, quick=4))
def test_an_encoder_whose_positions_rotate(case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    config = getattr(transformers, f"{name}Config")(**BASE | options)
    verify(getattr(transformers, f"{name}ForMaskedLM")(config), tmp_path, greedy=False)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_of_published_sizes_is_understood(name: str) -> None:
    family, there = families()[name], PUBLISHED[name]
    cfg = family.config(there)
    assert unheard("config.json", there, family, cfg) == [] and family.homeless(cfg) == []
    assert family_for(cfg, imported=name).name == name


def test_the_names_of_nomics_own_files_say_the_same() -> None:
    family = families()["nomic_bert"]
    there = {family.renamed.get(key, key): value for key, value in OWN.items()}
    cfg = family.config(there)
    assert unheard("config.json", there, family, cfg) == []
    assert resolved(cfg) == resolved(family.config(PUBLISHED["nomic_bert"]))
    for key, value in (("qkv_proj_bias", True), ("rotary_scaling_factor", 2), ("prenorm", True), ("rotary_emb_fraction", 0.5)):
        with pytest.raises(ConfigError, match=f"{key}={value} has no place in lm's nomic_bert"):
            unheard("config.json", there | {key: value}, family, cfg)


@pytest.mark.parametrize("key, value", [("rotary_value", True), ("embedding_size", 384)])
def test_rotated_values_and_narrower_embeddings_are_refused_by_name(key: str, value: Any) -> None:
    family, there = families()["roformer"], PUBLISHED["roformer"] | {key: value}
    with pytest.raises(ConfigError, match=f"{key}={value} has no place in lm's roformer"):
        unheard("config.json", there, family, family.config(there))
