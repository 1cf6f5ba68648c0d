"""Which keys of config.json the families know."""

from typing import Any

import pytest

from lm.hf.io.family import families
from lm.hf.options.keys import unheard

PUBLISHED: dict[str, dict[str, Any]] = {
    "starcoder2": {
        "activation_function": "gelu", "attention_dropout": 0.1, "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 3072, "intermediate_size": 12288, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384,
        "norm_epsilon": 1e-05, "num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2, "residual_dropout": 0.1,
        "rope_theta": 999999.44, "scale_attn_weights": True, "sliding_window": 4096, "use_bias": True, "vocab_size": 49152,
        "attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True,
    },
    "bart": {
        "activation_dropout": 0.1, "activation_function": "gelu", "add_final_layer_norm": False, "attention_dropout": 0.0, "d_model": 1024,
        "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layers": 6, "decoder_start_token_id": 2, "dropout": 0.1,
        "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layers": 12, "max_position_embeddings": 1024,
        "normalize_before": False, "normalize_embedding": True, "num_hidden_layers": 12, "scale_embedding": False,
        "static_position_embeddings": False, "vocab_size": 50264,
    },
    "switch_transformers": {
        "d_ff": 3072, "d_kv": 64, "d_model": 768, "decoder_sparse_step": 2, "decoder_start_token_id": 0, "dense_act_fn": "relu",
        "dropout_rate": 0.1, "encoder_sparse_step": 2, "expert_capacity": 64, "feed_forward_proj": "relu", "is_gated_act": False,
        "layer_norm_epsilon": 1e-06, "num_decoder_layers": 12, "num_experts": 8, "num_heads": 12, "num_layers": 12,
        "num_sparse_decoder_layers": 6, "num_sparse_encoder_layers": 6, "router_bias": False, "router_dtype": "float32",
        "router_jitter_noise": 0.01, "vocab_size": 32128,
    },
    "gemma2": {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192,
        "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000, "cache_implementation": "hybrid",
    },
    "gpt2": {
        "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768,
        "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257,
    },
    "qwen3_moe": {
        "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
        "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip
"""Of files whose keys are names in other families too."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_published_files_say_is_known(name: str) -> None:
    family, hf = families()[name], PUBLISHED[name]
    assert unheard("config.json", hf, family, family.config(hf)) == []


def test_what_has_no_effect_in_one_family_says_nothing_in_another() -> None:
    """Seen to fail: files of Bloom were refused for a key that StarCoder 1 knows and does nothing by."""
    known = families()
    hf = {"hidden_size": 1024, "n_head": 16, "n_layer": 24, "vocab_size": 250880, "attention_softmax_in_fp32": True}
    assert "attention_softmax_in_fp32" in known["gpt_bigcode"].known_keys()
    assert unheard("here", hf, known["bloom"], known["bloom"].config(hf)) == ["config.json: not used: attention_softmax_in_fp32=True"]


def test_the_longest_row_of_a_tokenizer_is_not_used() -> None:
    """Of c4ai-command-r-v01. Seen to fail: it was refused, since Kimi Linear has its context under this name."""
    hf = {
        "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 22528,
        "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings": 8192, "model_max_length": 131072,
        "num_attention_heads": 64, "num_hidden_layers": 40, "num_key_value_heads": 64, "rope_theta": 8000000.0, "use_qk_norm": False,
        "vocab_size": 256000,
    }  # fmt: skip
    cohere = families()["cohere"]
    cfg = cohere.config(hf)
    assert cfg.max_seq_len == 8192 and unheard("here", hf, cohere, cfg) == ["config.json: not used: model_max_length=131072"]


@pytest.mark.parametrize("name", families())
def test_a_number_that_a_file_leaves_out_is_that_of_the_class(name: str) -> None:
    """Where it follows from others, lm has null. Seen to fail: XLM-RoBERTa-XL had BERT's epsilon, 1e-12."""
    transformers = pytest.importorskip("transformers")
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers has no class of this name")
    theirs = transformers.CONFIG_MAPPING[name]().to_dict()
    numbers = {key: missing for _, key, missing in families()[name].places() if isinstance(missing, int | float) and key in theirs}
    assert numbers == {key: pytest.approx(theirs[key]) for key in numbers}
