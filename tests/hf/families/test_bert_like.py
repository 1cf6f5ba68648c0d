"""What is like BERT: ERNIE and Megatron-BERT; and EuroBERT, which is like Llama but for reading both ways."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.io.family import families  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import LENGTH, VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 100,
    "max_position_embeddings": LENGTH, "pad_token_id": 0,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 500.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie": ("Ernie", {"hidden_act": "relu"}),
    "megatron-bert": ("MegatronBert", {"type_vocab_size": 3}),
    "eurobert": ("EuroBert", {"num_key_value_heads": 2, "rope_parameters": ROPE}),
    "eurobert, biases, another width of heads, tied": (
        "EuroBert", {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    "megatron-bert, relu": ("MegatronBert", {"hidden_act": "relu", "layer_norm_eps": 1e-3}),
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "ernie": {
        "architectures": ["ErnieForMaskedLM"], "attention_probs_dropout_prob": 0.1, "hidden_act": "relu", "hidden_dropout_prob": 0.1,
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 513, "model_type": "ernie", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0,
        "task_type_vocab_size": 3, "type_vocab_size": 2, "use_task_id": False, "vocab_size": 18000,
    },
    "eurobert": {
        "architectures": ["EuroBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token": "<|begin_of_text|>",
        "bos_token_id": 128000, "classifier_pooling": "late", "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu",
        "hidden_dropout": 0.0, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "mask_token_id": 128002,
        "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "eurobert", "num_attention_heads": 12,
        "num_hidden_layers": 12, "num_key_value_heads": 12, "pad_token_id": 128001, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 250000, "tie_word_embeddings": False, "use_cache": False, "vocab_size": 128256,
    },
    "megatron-bert": {
        "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 4096, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
        "model_type": "megatron-bert", "num_attention_heads": 16, "num_hidden_layers": 24, "pad_token_id": 0, "type_vocab_size": 2,
        "use_cache": True, "vocab_size": 50176,
    },
}  # fmt: skip
"""ernie-1.0-base-zh's, EuroBERT-210m's and gatortron-base's, as their files have them."""


@pytest.mark.parametrize("case", cases(CASES, quick=4))
def test_a_family_like_bert(case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    config = getattr(transformers, f"{name}Config")(**BASE | options)
    verify(getattr(transformers, f"{name}ForMaskedLM")(config), tmp_path, greedy=False)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_of_published_sizes_is_understood(name: str) -> None:
    family, there = families()[name], PUBLISHED[name]
    cfg = family.config(there)
    notes = unheard("config.json", there, family, cfg)
    assert all("bos_token" in note for note in notes), notes
    assert family.homeless(cfg) == [] and family_for(cfg, imported=name).name == name


def test_embeddings_of_tasks_are_refused() -> None:
    family, there = families()["ernie"], PUBLISHED["ernie"] | {"use_task_id": True}
    with pytest.raises(ConfigError, match="use_task_id=True has no place in lm's ernie"):
        unheard("config.json", there, family, family.config(there))
