"""The first GPT, GPT-Neo, and SantaCoder and StarCoder 1 (GPT BigCode)."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.io.family import families  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, verify  # noqa: E402

NEO: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_layers": 4, "num_heads": 6, "max_position_embeddings": 64, "window_size": 7,
    "attention_types": [[["global", "local"], 2]],
}  # fmt: skip
BIG: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "neo": ("GPTNeoForCausalLM", NEO),
    "gpt": ("OpenAIGPTLMHeadModel", BIG),
    "gpt, another activation, untied": ("OpenAIGPTLMHeadModel", BIG | {"afn": "swish", "tie_word_embeddings": False}),
    "neo, no windows, untied, another feed-forward": (
        "GPTNeoForCausalLM",
        NEO | {"attention_types": [[["global"], 4]], "tie_word_embeddings": False, "intermediate_size": 72, "activation_function": "relu"},
    ),
    "neo, a window in three of four layers": ("GPTNeoForCausalLM", NEO | {"attention_types": [[["local"], 3], [["global"], 1]]}),
    "bigcode": ("GPTBigCodeForCausalLM", BIG),
    "bigcode, a head of keys for each of queries, untied, another feed-forward": (
        "GPTBigCodeForCausalLM", BIG | {"multi_query": False, "tie_word_embeddings": False, "n_inner": 72, "activation_function": "gelu"},
    ),
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt_neo": {
        "activation_function": "gelu_new", "architectures": ["GPTNeoForCausalLM"], "attention_dropout": 0,
        "attention_layers": ["global", "local"] * 2, "attention_types": [[["global", "local"], 2]], "embed_dropout": 0,
        "gradient_checkpointing": False, "hidden_size": 768, "intermediate_size": None, "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 2048, "model_type": "gpt_neo", "num_heads": 16, "num_layers": 4, "resid_dropout": 0,
        "vocab_size": 50257, "window_size": 256,
    },
    "openai-gpt": {
        "afn": "gelu", "architectures": ["OpenAIGPTLMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "openai-gpt", "n_ctx": 512, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 512, "n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1, "summary_activation": None,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 40478,
    },
    "gpt_bigcode": {
        "activation_function": "gelu", "architectures": ["GPTBigCodeForCausalLM"], "attention_softmax_in_fp32": True, "attn_pdrop": 0.1,
        "embd_pdrop": 0.1, "inference_runner": 0, "layer_norm_epsilon": 1e-05, "max_batch_size": None, "max_sequence_length": None,
        "model_type": "gpt_bigcode", "multi_query": True, "n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_layer": 40,
        "n_positions": 8192, "pad_key_length": True, "pre_allocate_kv_cache": False, "resid_pdrop": 0.1,
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "validate_runner_input": True, "vocab_size": 49152,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_family_like_gpt2(case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    model = getattr(transformers, name)
    verify(model(model.config_class(**options)), tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_of_published_sizes_is_understood(name: str) -> None:
    """The sizes of TinyStories 33M, of the first GPT, and of StarCoder, 15.5B."""
    family, there = families()[name], PUBLISHED[name]
    cfg = family.config(there)
    assert unheard("config.json", there, family, cfg) == [] and family.homeless(cfg) == []


@pytest.mark.parametrize("types", [[[["global", "local"], 12]], [[["local", "global", "global", "local"], 1]], [[["dense"], 4]]], ids=str)
def test_windows_of_another_pattern_or_number_of_layers_are_refused(types: Any) -> None:
    with pytest.raises(ConfigError, match=r"attention_types=\[\[\[.* with sliding_window=7 is not a window in all layers but every n-th"):
        families()["gpt_neo"].config(NEO | {"attention_types": types})


def test_the_layers_of_gpt_neo_go_before_their_types() -> None:
    """As in transformers, which writes both. Seen to fail: the types were read, and the windows stood in the other layers."""
    told = NEO | {"attention_layers": ["local", "global"] * 2}
    assert transformers.GPTNeoConfig(**told).attention_layers == told["attention_layers"]
    swapped = NEO | {"attention_types": [[["local", "global"], 2]]}
    found, wanted = (families()["gpt_neo"].config(each) for each in (told, swapped))
    assert found == wanted != families()["gpt_neo"].config(NEO)
