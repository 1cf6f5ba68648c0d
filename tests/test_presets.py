"""Presets with published sizes have the published number of parameters, and shrink by plain overrides to models that train."""

import math
import re
import shlex
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lm.cli.compose import catalog
from lm.cli.compose.compose import compose
from lm.errors import ConfigError
from lm.hf.io.writing import family_for
from lm.losses.cross_entropy import LossSums
from lm.losses.tokens import causal_reader
from lm.nn.batch import Batch
from lm.nn.transformer import LM, DecoderConfig, EncoderDecoderConfig, build_model
from lm.training.config import TrainConfig
from lm.training.optim.base import begin_state
from tests.training.optim.optimizers import built

OURS = {"tiny", "nano", "nano_deep", "micro", "llama_tiny", "moe_tiny", "deepseek_tiny", "bert_tiny", "llada_tiny", "t5_tiny"}
SHAPES = {
    **dict.fromkeys(("gpt2", "gpt2_medium", "gpt2_xl"), "model.vocab_size=50257 model.max_seq_len=1024"),
    "transformer_base": "model.max_seq_len=256",
}  # left to tokenizer and data
OBJECTIVES = {
    **dict.fromkeys(("albert_base", "bert_base", "bert_large", "bert_tiny", "deberta_v3_base"), "objective=mlm"),
    **dict.fromkeys(("llada_8b", "llada_tiny"), "objective=diffusion"),
    **dict.fromkeys(
        ("t5_tiny", "transformer_base", "t5_small", "t5_1_1_base", "bart_base", "switch_base_8"), "objective=seq2seq data=stdlib_docstrings"
    ),
}

Published = tuple[str, dict[str, Any]]


def llama_like(architecture: str, sizes: tuple[int, int, int, int, int, int, int], positions: int, tied: bool, **more: Any) -> Published:
    """sizes: vocabulary, width, feed-forward's width, layers, heads, key-value heads, width of a head."""
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    return architecture, dict(zip(names, sizes, strict=True)) | {"max_position_embeddings": positions, "tie_word_embeddings": tied} | more


def gpt2(width: int, layers: int, heads: int) -> Published:
    sizes = {"vocab_size": 50257, "n_positions": 1024, "n_embd": width, "n_inner": 4 * width, "n_layer": layers, "n_head": heads}
    return "GPT2LMHeadModel", sizes | {"tie_word_embeddings": True}


def bert(width: int, layers: int, heads: int) -> Published:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "num_attention_heads": heads}
    texts = {"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}
    return "BertForMaskedLM", sizes | texts | {"tie_word_embeddings": True}


def t5_like(architecture: str, width: int, hidden: int, layers: int, heads: int, tied: bool = True, **more: Any) -> Published:
    sizes = {"d_model": width, "d_ff": hidden, "num_layers": layers, "num_decoder_layers": layers, "num_heads": heads, "d_kv": 64}
    return architecture, sizes | {"vocab_size": 32128, "relative_attention_num_buckets": 32, "tie_word_embeddings": tied} | more


def nemotron_h(sizes: tuple[int, int, int, int], layers: str, **more: Any) -> Published:
    """sizes: width, heads, key-value heads, heads of Mamba-2."""
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "mamba_num_heads")
    heads = {"head_dim": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "conv_kernel": 4, "expand": 2, "n_groups": 8}
    biases = dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "use_bias", "tie_word_embeddings"), False)
    unused = dict.fromkeys(("intermediate_size", "n_routed_experts", "n_shared_experts", "moe_intermediate_size"), 1)
    unused |= {"moe_shared_expert_intermediate_size": 1, "max_position_embeddings": 8192, "num_logits_to_keep": 1}
    given = unused | heads | biases | {"vocab_size": 131072, "use_conv_bias": True, "hybrid_override_pattern": layers}
    return "NemotronHForCausalLM", given | dict(zip(names, sizes, strict=True)) | more


UNBIASED = {"attention_bias": False}
NEMOTRON_H = "M-M-M-M" + "*-M-M-M-M-M" * 4 + "-"
LLAMA = UNBIASED | {"mlp_bias": False}
T5, SWITCH = "T5ForConditionalGeneration", "SwitchTransformersForConditionalGeneration"
PUBLISHED: dict[str, Published] = {  # class, and the sizes in config.json of the release
    "albert_base": ("AlbertForMaskedLM", bert(768, 12, 12)[1] | {"vocab_size": 30000, "embedding_size": 128}),
    "bert_base": bert(768, 12, 12),
    "bert_large": bert(1024, 24, 16),
    "deberta_v3_base": (
        "DebertaV2ForMaskedLM",
        bert(768, 12, 12)[1]
        | {
            "vocab_size": 128100, "type_vocab_size": 0, "pooler_hidden_size": 768, "max_relative_positions": 512, "position_buckets": 256,
            "relative_attention": True, "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p",
            "position_biased_input": False,
        },
    ),
    "gpt2": gpt2(768, 12, 12),
    "gpt2_medium": gpt2(1024, 24, 16),
    "gpt2_xl": gpt2(1600, 48, 25),
    "t5_small": t5_like(T5, 512, 2048, 6, 8, feed_forward_proj="relu"),
    "t5_1_1_base": t5_like(T5, 768, 2048, 12, 12, tied=False, feed_forward_proj="gated-gelu"),
    "switch_base_8": t5_like(
        SWITCH, 768, 3072, 12, 12, num_experts=8, num_sparse_encoder_layers=6, num_sparse_decoder_layers=6, router_bias=False
    ),
    "bart_base": (
        "BartForConditionalGeneration",
        {
            "vocab_size": 50265, "max_position_embeddings": 1024, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
            "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
            "tie_word_embeddings": True,
        },
    ),
    "bloom_560m": (
        "BloomForCausalLM",
        {"vocab_size": 250880, "hidden_size": 1024, "n_layer": 24, "n_head": 16, "tie_word_embeddings": True},
    ),
    "gpt_neox_20b": (
        "GPTNeoXForCausalLM",
        {
            "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44, "num_attention_heads": 64,
            "max_position_embeddings": 2048, "attention_bias": True, "tie_word_embeddings": False, "hidden_act": "gelu_fast",
        },
    ),
    "llada_8b": llama_like("LlamaForCausalLM", (126464, 4096, 12288, 32, 32, 32, 128), 4096, tied=False, **LLAMA),
    "llama3_8b": llama_like("LlamaForCausalLM", (128256, 4096, 14336, 32, 32, 8, 128), 8192, tied=False, **LLAMA),
    "llama3_70b": llama_like("LlamaForCausalLM", (128256, 8192, 28672, 80, 64, 8, 128), 8192, tied=False, **LLAMA),
    "llama3_2_1b": llama_like("LlamaForCausalLM", (128256, 2048, 8192, 16, 32, 8, 64), 131072, tied=True, **LLAMA),
    "mistral_7b": llama_like("MistralForCausalLM", (32000, 4096, 14336, 32, 32, 8, 128), 32768, tied=False),
    "mixtral_8x7b": llama_like("MixtralForCausalLM", (32000, 4096, 14336, 32, 32, 8, 128), 32768, tied=False, num_local_experts=8),
    "qwen3_0_6b": llama_like("Qwen3ForCausalLM", (151936, 1024, 3072, 28, 16, 8, 128), 40960, tied=True, **UNBIASED),
    "qwen3_1_7b": llama_like("Qwen3ForCausalLM", (151936, 2048, 6144, 28, 16, 8, 128), 40960, tied=True, **UNBIASED),
    "gemma2_2b": llama_like("Gemma2ForCausalLM", (256000, 2304, 9216, 26, 8, 4, 256), 8192, tied=True, **UNBIASED),
    "gemma3_1b": llama_like("Gemma3ForCausalLM", (262144, 1152, 6912, 26, 4, 1, 256), 32768, tied=True, **UNBIASED),
    "smollm3_3b": llama_like(
        "SmolLM3ForCausalLM", (128256, 2048, 11008, 36, 16, 4, 128), 65536, tied=True, no_rope_layer_interval=4, **LLAMA
    ),
    "olmo2_1b": llama_like("Olmo2ForCausalLM", (100352, 2048, 8192, 16, 16, 16, 128), 4096, tied=False, **UNBIASED),
    "phi3_mini": llama_like("Phi3ForCausalLM", (32064, 3072, 8192, 32, 32, 32, 96), 4096, tied=False),
    "granite_3_1_2b": llama_like("GraniteForCausalLM", (49152, 2048, 8192, 40, 32, 8, 64), 131072, tied=True, **LLAMA),
    "starcoder2_3b": llama_like("Starcoder2ForCausalLM", (49152, 3072, 12288, 30, 24, 2, 128), 16384, tied=True, use_bias=True),
    "lfm2_1_2b": (
        "Lfm2ForCausalLM",
        {
            "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "max_position_embeddings": 128000, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "conv_L_cache": 3, "tie_word_embeddings": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "conv_bias": False,
        },
    ),
    "mamba2_130m": (
        "Mamba2ForCausalLM",
        {
            "vocab_size": 50288, "hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64, "state_size": 128,
            "n_groups": 1, "conv_kernel": 4, "expand": 2, "time_step_rank": 48, "use_bias": False, "use_conv_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "olmo_hybrid_7b": (
        "OlmoHybridForCausalLM",
        {
            "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 30,
            "num_key_value_heads": 30, "max_position_embeddings": 65536, "linear_num_key_heads": 30, "linear_num_value_heads": 30,
            "linear_key_head_dim": 96, "linear_value_head_dim": 192, "linear_conv_kernel_dim": 4, "attention_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "recurrent_gemma_2b": (
        "RecurrentGemmaForCausalLM",
        {
            "vocab_size": 256000, "hidden_size": 2560, "intermediate_size": 15360, "num_hidden_layers": 26, "num_attention_heads": 10,
            "num_key_value_heads": 1, "head_dim": 256, "lru_width": 2560, "conv1d_width": 4, "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "jamba_v0_1": (
        "JambaForCausalLM",
        {
            "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "max_position_embeddings": 262144, "num_experts": 16, "expert_layer_period": 2,
            "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4,
            "mamba_expand": 2, "mamba_dt_rank": 256, "mamba_conv_bias": True, "mamba_proj_bias": False, "tie_word_embeddings": False,
        },
    ),
    "falcon_h1_0_5b": (
        "FalconH1ForCausalLM",
        {
            "vocab_size": 32784, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 16384, "mamba_d_ssm": 1536, "mamba_n_heads": 24,
            "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
            "mamba_proj_bias": False, "projectors_bias": False, "num_logits_to_keep": 1, "tie_word_embeddings": False, **LLAMA,
        },
    ),
    "nemotron_h_8b": nemotron_h((4096, 32, 8, 128), NEMOTRON_H, intermediate_size=21504),
    "nemotron_3_nano": nemotron_h(
        (2688, 32, 2, 64), "MEMEM*E" * 5 + "MEMEMEM*EMEMEMEME", n_routed_experts=128, n_shared_experts=1, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
    ),
    "nanochat_d20": llama_like("NanoChatForCausalLM", (65536, 1280, 5120, 20, 10, 10, 128), 2048, tied=False, **UNBIASED),
    "gpt_oss_20b": llama_like(
        "GptOssForCausalLM", (201088, 2880, 2880, 24, 64, 8, 64), 131072, tied=False, num_local_experts=32, attention_bias=True
    ),
    "llama4_scout": llama_like(
        "Llama4ForCausalLM", (202048, 5120, 8192, 48, 40, 8, 128), 10485760, tied=False, intermediate_size_mlp=16384, num_local_experts=16,
        interleave_moe_layer_step=1, no_rope_layer_interval=4, floor_scale=8192, **UNBIASED
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "kv_lora_rank": 512,
            "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 3,
            "max_position_embeddings": 4096, "attention_bias": False, "tie_word_embeddings": False, "head_dim": 64,
        },
    ),
    "deepseek_v32": (
        "DeepseekV32ForCausalLM",
        {
            "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "kv_lora_rank": 512,
            "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 3,
            "max_position_embeddings": 163840, "attention_bias": False, "tie_word_embeddings": False, "head_dim": 64,
            "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "mlp_bias": False,
        },
    ),
    "kimi_linear_48b": (
        "KimiLinearForCausalLM",
        {
            "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_hidden_layers": 27,
            "num_attention_heads": 32, "num_key_value_heads": 32, "num_shared_experts": 1, "num_experts": 256, "kv_lora_rank": 512,
            "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1,
            "model_max_length": 1048576, "attention_bias": False, "tie_word_embeddings": False, "head_dim": 72, "linear_head_dim": 128,
            "linear_num_heads": 32, "linear_conv_kernel_dim": 4, "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers": [layer for layer in range(1, 27) if layer % 4],
            },
        },
    ),
}  # fmt: skip
NO_SIZE = re.compile(  # numbers of a config that no weight's shape depends on, and those that follow from others
    "token_id|chunk_size|pretraining_tp|window|scalar|per_tok|group|capacity|max_distance|original_max|sparse_step|nextn|qk_head_dim|output_"
)
BEYOND = {  # parameters that transformers has beyond the model
    "bart_base": 2 * 2 * 768 - 50265,  # rows 0 and 1 of its position tables, which nothing reads; the bias of the head is a buffer there
    "t5_1_1_base": -32128 * 768,  # version 5 ties the head, which the released weights do not
}

PAPERS = {  # the paper's figure, and what its rounding leaves open
    "palm_8b": (8.63e9, 0.005e9),
    "gpt3_6_7b": (6.7e9, 0.05e9),
    "transformer_base": (65e6, 2.5e6),  # whose vocabulary is "about 37,000"
}

MOE = "model.ffn.n_experts=4 model.ffn.expert.hidden=24"
MLA = (
    "model.attention.n_heads=4 model.attention.q_rank=16 model.attention.kv_rank=12 model.attention.nope_dim=8"
    " model.attention.rope_dim=4 model.attention.v_dim=8 model.ffn.first_dense=1 model.ffn.dense.hidden=64"
)
GQA = "model.attention.n_heads=4 model.attention.n_kv_heads=2"
T5_INIT = "model.head.scale=0.177 model.init.std=0.1"  # at 0.02 three steps are too few: the head starts sqrt(d_model) times smaller
TINY = {
    "tiny": GQA,
    "nano": "model.ffn.hidden=64",
    "nano_deep": "model.ffn.hidden=64",
    "micro": "model.ffn.hidden=64",
    "llama_tiny": f"{GQA} model.ffn.hidden=64",
    "moe_tiny": f"{GQA} {MOE}",
    "deepseek_tiny": f"{MLA} model.ffn.router.n_groups=2 model.ffn.router.top_groups=1 {MOE}",
    "bert_tiny": "model.ffn.hidden=64",
    "llada_tiny": f"{GQA} model.ffn.hidden=64",
    "llada_8b": "model.attention.n_heads=4 model.ffn.hidden=64",
    "t5_tiny": "model.ffn.hidden=64",
    "transformer_base": "model.attention.n_heads=4 model.ffn.hidden=64 model.embed.scale=5.66",
    "albert_base": "model.attention.n_heads=4 model.ffn.hidden=64 model.residual.times=2 model.embed.factorized.width=12",
    "bert_base": "model.attention.n_heads=4 model.ffn.hidden=64",
    "bert_large": "model.attention.n_heads=4 model.ffn.hidden=64",
    "deberta_v3_base": "model.attention.n_heads=4 model.attention.scale=0.2 model.attention.disentangled.n_buckets=8 model.ffn.hidden=64",
    **dict.fromkeys(("gpt2", "gpt2_medium", "gpt2_xl"), "model.attention.n_heads=4"),
    "gpt3_6_7b": "model.attention.n_heads=4 model.attention.window=5",
    "t5_small": f"model.attention.n_heads=4 model.attention.head_dim=8 model.ffn.hidden=64 {T5_INIT}",
    "t5_1_1_base": "model.attention.n_heads=4 model.attention.head_dim=8 model.ffn.hidden=64",
    "bart_base": "model.attention.n_heads=4 model.ffn.hidden=64",
    "bloom_560m": "model.attention.n_heads=4",
    "gpt_neox_20b": "model.attention.n_heads=4",
    "palm_8b": "model.attention.n_heads=4 model.attention.head_dim=8 model.ffn.hidden=64 model.head.scale=0.177",
    "switch_base_8": f"model.attention.n_heads=4 model.attention.head_dim=8 model.ffn.dense.hidden=64 {T5_INIT} {MOE}",
    **dict.fromkeys(("llama3_8b", "llama3_70b", "llama3_2_1b"), f"{GQA} model.ffn.hidden=64"),
    "mistral_7b": f"{GQA} model.ffn.hidden=64 model.attention.window=5",
    "mixtral_8x7b": f"{GQA} {MOE}",
    **dict.fromkeys(("qwen3_0_6b", "qwen3_1_7b"), f"{GQA} model.attention.head_dim=16 model.ffn.hidden=64"),
    "gemma2_2b": f"{GQA} model.attention.head_dim=16 model.attention.window=5 model.ffn.hidden=64 model.embed.scale=5.66",
    "gemma3_1b": f"{GQA} model.attention.head_dim=16 model.attention.window=5 model.ffn.hidden=64 model.embed.scale=5.66",
    "smollm3_3b": f"{GQA} model.ffn.hidden=64",
    "olmo2_1b": "model.attention.n_heads=4 model.ffn.hidden=64",
    "deepseek_v3": f"{MLA} model.ffn.top_k=2 model.ffn.router.n_groups=2 model.ffn.router.top_groups=1 model.mtp.depth=1 {MOE}",
    "deepseek_v32": f"{MLA} model.ffn.top_k=2 model.ffn.router.n_groups=2 model.ffn.router.top_groups=1 model.position.scaling=null"
    f" model.attention.scale=null model.attention.indexer.n_heads=9 model.attention.indexer.head_dim=8 {MOE}"
    " model.attention.indexer.top_k=5",
    "kimi_linear_48b": f"{MLA} model.attention.q_rank=null model.recurrent.n_heads=4 model.recurrent.k_dim=6 model.recurrent.v_dim=6"
    f" model.ffn.top_k=2 {MOE} model.n_layers=4",
    "phi3_mini": "model.attention.n_heads=4 model.attention.window=5 model.ffn.hidden=64",
    "granite_3_1_2b": f"{GQA} model.ffn.hidden=64 model.head.scale=1.0",
    "starcoder2_3b": f"{GQA} model.attention.window=5 model.ffn.hidden=64",
    "lfm2_1_2b": f"{GQA} model.ffn.hidden=64 model.n_layers=3",
    "olmo_hybrid_7b": "model.attention.n_heads=4 model.recurrent.n_heads=4 model.recurrent.k_dim=6 model.recurrent.v_dim=10"
    " model.ffn.hidden=64 model.n_layers=4",
    "recurrent_gemma_2b": "model.attention.n_heads=4 model.recurrent.n_heads=4 model.recurrent.width=32 model.attention.window=5"
    " model.ffn.hidden=64 model.n_layers=3 model.embed.scale=5.66",
    "jamba_v0_1": f"{GQA} model.recurrent.width=32 model.recurrent.rank=4 model.ffn.dense.hidden=64 model.n_layers=5 {MOE}",
    "falcon_h1_0_5b": f"{GQA} model.attention.head_dim=8 model.attention.scale=0.2 model.recurrent.n_heads=8 model.recurrent.head_dim=8"
    " model.recurrent.state_dim=8 model.ffn.hidden=64 model.head.scale=1.0",
    "nemotron_h_8b": f"{GQA} model.attention.head_dim=8 model.recurrent.n_heads=8 model.recurrent.head_dim=8 model.recurrent.state_dim=8"
    " model.ffn.hidden=64 model.n_layers=9",
    "nemotron_3_nano": f"{GQA} model.attention.head_dim=8 model.recurrent.n_heads=8 model.recurrent.head_dim=8 model.recurrent.state_dim=8"
    f" model.ffn.top_k=2 model.ffn.shared_hidden=24 model.n_layers=7 {MOE}",
    "mamba2_130m": "model.recurrent.n_heads=4 model.recurrent.head_dim=16 model.recurrent.state_dim=8",
    "nanochat_d20": "model.attention.n_heads=4",
    "gpt_oss_20b": f"{GQA} model.attention.head_dim=8 model.attention.window=5 model.ffn.top_k=2 {MOE}",
    "llama4_scout": f"{GQA} model.attention.head_dim=8 model.attention.window=5 {MOE} model.attention.global_every=2"
    " model.position.none_every=2",
}
SMALL = "model.vocab_size=96 model.max_seq_len=16 model.d_model=32 model.n_layers=2 data.seq_len=16 optim=adamw optim.lr=1e-2"


def composed(preset: str, overrides: str = "") -> TrainConfig:
    return compose(shlex.split(f"model={preset} {OBJECTIVES.get(preset, '')} {overrides}")).config()


def trained_parameters(model: torch.nn.Module) -> int:
    """Without correction biases, which are a parameter without gradient here and a buffer in transformers."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def ours(preset: str) -> int:
    return trained_parameters(build_model(composed(preset, SHAPES.get(preset, "")).model, device="meta"))


def test_every_preset_is_counted_and_shrunk() -> None:
    presets = set(catalog.groups()["model"])
    assert len(presets) >= 35
    assert presets == OURS | PUBLISHED.keys() | PAPERS.keys() == TINY.keys()


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_parameters_of_transformers_model(preset: str) -> None:
    name, changes = PUBLISHED[preset]
    found = getattr(transformers, name)
    with torch.device("meta"):
        theirs = found(found.config_class(**changes))
    assert ours(preset) == trained_parameters(theirs) - BEYOND.get(preset, 0)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_no_size_is_left_to_the_defaults_of_transformers(preset: str) -> None:
    name, sizes = PUBLISHED[preset]
    config = getattr(transformers, name).config_class().to_dict()
    numbers = {key for key, value in config.items() if isinstance(value, int) and not isinstance(value, bool) and not NO_SIZE.search(key)}
    assert numbers | {key for key in config if key.endswith("bias") or key == "tie_word_embeddings"} <= sizes.keys()


HOMELESS = {
    "gpt3_6_7b": "global_every",
    "palm_8b": "position.interleaved",
    "transformer_base": "position.halves",
    "t5_tiny": "attention.scale",
    "nano_deep": "value_residual",
}


@pytest.mark.parametrize("preset", sorted(catalog.groups()["model"]))
def test_a_preset_has_a_family_of_transformers_or_an_option_without_one(preset: str) -> None:
    cfg = composed(preset, SHAPES.get(preset, "")).model
    cfg = cfg.replace(vocab_size=cfg.vocab_size or 256, max_seq_len=cfg.max_seq_len or 128)
    if isinstance(cfg, EncoderDecoderConfig) and cfg.start_token is None:
        cfg = cfg.replace(start_token=0)
    if isinstance(cfg, DecoderConfig):
        cfg = cfg.replace(mtp=None)
    if preset in HOMELESS:
        with pytest.raises(ConfigError, match=f"no family can hold this model.*{HOMELESS[preset]}"):
            family_for(cfg)
    else:
        assert family_for(cfg).homeless(cfg) == []


def test_a_further_size_of_a_family_is_a_dozen_lines() -> None:
    derived = [preset for preset in PUBLISHED if len(catalog.lineage("model", preset)) > 1]
    assert len(derived) >= 6 and len({catalog.lineage("model", preset)[0] for preset in derived}) >= 4
    lengths = {preset: len(catalog.file_of("model", preset).read_text(encoding="utf-8").splitlines()) for preset in derived}
    assert max(lengths.values()) <= 16 and sum(lengths.values()) <= 12 * len(lengths)


@pytest.mark.parametrize("preset", PAPERS)
def test_a_preset_has_the_parameters_that_its_paper_tells(preset: str) -> None:
    told, rounding = PAPERS[preset]
    assert abs(ours(preset) - told) <= rounding


@pytest.mark.parametrize("preset", TINY)
def test_a_preset_shrinks_by_overrides_to_a_model_that_trains(preset: str) -> None:
    cfg = composed(preset, f"{SMALL} {TINY[preset]}")
    model = build_model(cfg.model, seed=0)
    assert sum(p.numel() for p in model.parameters()) < 100_000
    losses = [float(loss) for loss in three_steps(cfg, model)]
    assert losses[0] == pytest.approx(math.log(96), rel=0.25)  # nothing is known yet
    assert losses[1] < losses[0] and losses[2] < losses[0] - 0.1


def three_steps(cfg: TrainConfig, model: LM) -> list[Tensor]:
    """Losses of a fixed batch, nats a token."""
    torch.manual_seed(0)
    source = torch.randint(0, 96, (4, 16)) if isinstance(cfg.model, EncoderDecoderConfig) else None
    batch, labels = Batch(torch.randint(0, 96, (4, 16)), source_tokens=source), torch.randint(0, 96, (4, 16))
    optimizer = built(cfg.optim, model.named_parameters(), model.matrices())
    begin_state(optimizer)
    losses = []
    for _ in range(3):
        sums: LossSums = model(batch, causal_reader(labels))
        optimizer.zero_grad()
        (sums.total / labels.numel()).backward()
        optimizer.step()
        if sums.loads is not None:
            model.balance(sums.loads)
        losses.append(sums.nll / labels.numel())
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return losses
