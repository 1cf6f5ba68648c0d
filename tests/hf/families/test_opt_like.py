"""What is like OPT: BioGPT and XGLM."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.hf.io.family import families  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BIOGPT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 100,
    "max_position_embeddings": 64,
}  # fmt: skip
XGLM: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 48, "num_layers": 3, "attention_heads": 4, "ffn_dim": 100, "max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "biogpt": ("BioGpt", BIOGPT),
    "xglm": ("XGLM", XGLM),
    "biogpt, relu, untied, no scale": (
        "BioGpt", BIOGPT | {"hidden_act": "relu", "tie_word_embeddings": False, "scale_embedding": False},
    ),
    "xglm, relu, untied, no scale": (
        "XGLM", XGLM | {"activation_function": "relu", "tie_word_embeddings": False, "scale_embedding": False},
    ),
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "biogpt": {
        "activation_dropout": 0.0, "architectures": ["BioGptForCausalLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0,
        "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 1024, "initializer_range": 0.02,
        "intermediate_size": 4096, "layer_norm_eps": 1e-12, "layerdrop": 0.0, "max_position_embeddings": 1024, "model_type": "biogpt",
        "num_attention_heads": 16, "num_hidden_layers": 24, "pad_token_id": 1, "scale_embedding": True, "use_cache": True,
        "vocab_size": 42384,
    },
    "xglm": {
        "activation_dropout": 0, "activation_function": "gelu", "architectures": ["XGLMForCausalLM"], "attention_dropout": 0.1,
        "attention_heads": 16, "bos_token_id": 0, "d_model": 1024, "decoder_start_token_id": 2, "dropout": 0.1, "eos_token_id": 2,
        "ffn_dim": 4096, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "xglm", "num_layers": 24,
        "pad_token_id": 1, "scale_embedding": True, "use_cache": True, "vocab_size": 256008,
    },
}  # fmt: skip
"""biogpt's and xglm-564M's, as their files have them."""


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_a_family_like_opt(case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    verify(getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**options)), tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_of_published_sizes_is_understood(name: str) -> None:
    family, there = families()[name], PUBLISHED[name]
    cfg = family.config(there)
    notes = unheard("config.json", there, family, cfg)
    assert all("init_std" in note for note in notes), notes
    assert family.homeless(cfg) == [] and family_for(cfg, imported=name).name == name
