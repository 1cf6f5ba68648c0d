"""Qwen2 and Qwen2.5, dense.  Yang et al. 2024, arXiv:2407.10671."""

from lm.hf.families.llama import Llama
from lm.hf.families.qwen3 import Qwen3
from lm.hf.io.family import without


class Qwen2(Qwen3):
    """Llama with biases on queries, keys and values, and Qwen3's windows."""

    name = "qwen2"
    architecture = "Qwen2ForCausalLM"
    fields = {
        **without(Qwen3.fields, "*bias", "*head_dim"),
        "attention.n_kv_heads": ("num_key_value_heads", 32),
    }
    fixed = {**Llama.fixed, "attention.qkv_bias": True, "attention.out_bias": False}


FAMILY = Qwen2()
