"""Small random models of every architecture of llama.cpp that we have, tokenizers and odd texts."""

from pathlib import Path
from typing import Any

from lm.data.kinds import BPEConfig, BytesConfig
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.hf.gguf.writing import FILE, architecture_for, write_gguf
from lm.nn.model_config import model_config
from lm.nn.transformer import LM
from lm.schema import from_tree
from lm.testing.models import random_model

ROPE: dict[str, Any] = {"kind": "rope", "theta": 500.0}
YARN = {"kind": "yarn", "factor": 4.0, "original_len": 16, "beta_fast": 4.0}
LLAMA3 = {"kind": "llama3", "factor": 4.0, "original_len": 32}
LONGROPE = {"kind": "longrope", "short_factor": [1.0, 1.2] * 4, "long_factor": [1.0, 1.5, 2.0, 4.0] * 2, "original_len": 16}
HEADS: dict[str, Any] = {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2}
MLP: dict[str, Any] = {"kind": "mlp", "hidden": 96, "gated": True, "activation": "silu"}
PLAIN: dict[str, Any] = {"kind": "mlp", "hidden": 96, "gated": False, "activation": "gelu_tanh", "bias": True}
BIASED: dict[str, Any] = HEADS | {"qkv_bias": True, "out_bias": True}
EXPERT: dict[str, Any] = {"kind": "mlp", "hidden": 32, "gated": True, "activation": "silu"}
EXPERTS: dict[str, Any] = {"kind": "moe", "n_experts": 6, "top_k": 2, "expert": EXPERT, "router": {"kind": "softmax", "normalize": True}}
MLA: dict[str, Any] = {"kind": "mla", "n_heads": 4, "q_rank": 32, "kv_rank": 32, "nope_dim": 32, "rope_dim": 16, "v_dim": 32}
DEEP: dict[str, Any] = EXPERTS | {
    "n_experts": 8, "router": {"kind": "sigmoid", "n_groups": 4, "top_groups": 2, "scale": 1.5}, "n_shared": 1, "first_dense": 1,
    "dense": MLP,
}  # fmt: skip
LAYER: dict[str, Any] = {"kind": "layer"}
SIZES: dict[str, Any] = {
    "kind": "decoder", "max_seq_len": 128, "d_model": 64, "n_layers": 3, "norm": {"kind": "rms"}, "position": ROPE, "attention": HEADS,
    "ffn": MLP, "head": {"tied": False},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"ffn": MLP | {"bias": True}, "attention": BIASED | {"head_dim": 32}},
    "llama, tied, llama3 rope": {"head": {"tied": True}, "position": ROPE | {"scaling": LLAMA3}},
    "llama, yarn": {"position": ROPE | {"scaling": YARN | {"attention_factor": 0.7}}},
    "llama, a window as wide as the context": {"attention": HEADS | {"window": 128}},
    "llama with experts": {"ffn": EXPERTS},
    "granite": {
        "embed": {"scale": 1.7}, "attention": HEADS | {"scale": 0.3}, "block": {"kind": "sequential", "residual_scale": 0.6},
        "head": {"tied": False, "scale": 0.4},
    },
    "qwen2": {"attention": HEADS | {"qkv_bias": True}},
    "qwen3": {"attention": HEADS | {"qk_norm": "head", "head_dim": 32}},
    "qwen3, yarn": {"attention": HEADS | {"qk_norm": "head"}, "position": ROPE | {"scaling": YARN}},
    "qwen3moe": {"attention": HEADS | {"qk_norm": "head"}, "ffn": EXPERTS},
    "gemma2": {
        "norm": {"kind": "rms", "place": "sandwich", "zero_centered": True}, "ffn": MLP | {"activation": "gelu_tanh"},
        "embed": {"scale": 8.0}, "attention": HEADS | {"window": 9, "global_every": 2, "softcap": 5.0, "scale": 0.25},
        "head": {"tied": True, "softcap": 5.0},
    },
    "gpt2": {"norm": LAYER, "position": {"kind": "learned"}, "attention": BIASED | {"n_kv_heads": 4}, "ffn": PLAIN, "head": {"tied": True}},
    "phi3": {"position": ROPE | {"scaling": LONGROPE}},
    "olmo2": {"norm": {"kind": "rms", "place": "output", "eps": 1e-5}, "attention": HEADS | {"qk_norm": "full"}, "head": {"tied": True}},
    "starcoder2": {"norm": LAYER, "attention": BIASED, "ffn": PLAIN, "head": {"tied": True}},
    "gptneox": {
        "norm": LAYER, "attention": BIASED | {"n_kv_heads": 4}, "ffn": PLAIN, "position": ROPE | {"fraction": 0.25},
        "block": {"kind": "parallel", "shared_norm": False},
    },
    "bloom": {
        "norm": LAYER, "attention": BIASED | {"n_kv_heads": 4}, "ffn": PLAIN | {"hidden": 256}, "position": {"kind": "alibi"},
        "head": {"tied": True}, "embed": {"norm": True},
    },
    "deepseek2": {
        "attention": MLA, "position": ROPE | {"interleaved": True}, "norm": {"kind": "rms", "eps": 1e-6}, "ffn": DEEP,
    },
    "deepseek2, halves": {
        "attention": MLA, "position": ROPE, "norm": {"kind": "rms", "eps": 1e-6}, "ffn": DEEP | {"n_shared": 2}, "head": {"tied": True},
    },
    "gpt-oss": {
        "attention": BIASED | {"gpt_oss_sinks": True, "window": 9, "global_every": 2},
        "ffn": EXPERTS | {
            "expert": EXPERT | {"bias": True, "activation": "quick_gelu", "gpt_oss_limit": 7.0},
            "router": {"kind": "softmax", "bias": True},
        },
    },
}  # fmt: skip
FAMILIES = {"phi3": "phi3"}  # of those that a more general one can hold too
ODD = [
    "", "a", " a", "a ", "  \n\n  x", "\t\tif x:\r\n  y\r\r", "I'm you'RE they'd 'S", "1234567 12 1", "x=1;y+=22//3", "日本語とčeština",
    "🏳️‍🌈👩🏽‍💻", "न्हें", "a\u00a0b\u2003c", "<|eos|><|bos|>", "\x00\x01\x7f", "…—“”", "مرحبا ١٢٣", "e\u0301 ﬁ Ⅷ ²", "\ufeffx\u200b", "🙂" * 5,
    "''''", "   ", "\n", "don't\n\n\n    return",
]  # fmt: skip


def built(changes: str | dict[str, Any]) -> LM:
    """One of these, or the plain llama with changes."""
    return random_model(model_config(SIZES | {"vocab_size": 352} | (MODELS[changes] if isinstance(changes, str) else changes)))


def trained(pattern: str) -> Tokenizer:
    """On code and the odd texts; `bytes`: one without merges."""
    if pattern == "bytes":
        return BytesConfig().build()
    texts = ["def main(argv):\n    return 'it' + \"don't\" + str(12345)\n" * 3, *ODD]
    return from_tree(BPEConfig, {"vocab_size": 340, "pattern": pattern}).build(texts)


def written(folder: Path, model: LM, tokenizer: Tokenizer, dtype: str = "f32", family: str | None = None) -> Path:
    write_gguf(folder / FILE, architecture_for(model.cfg, family), model, tokenizer, dtype, "m")
    return folder / FILE
