"""ERNIE 4.5, dense.  Baidu 2025, "ERNIE 4.5 Technical Report"."""

from lm.hf.families.llama import Llama
from lm.hf.io.family import without


class Ernie45(Llama):
    """Llama whose rotation turns neighbours, with biases everywhere or nowhere."""

    name = "ernie4_5"
    architecture = "Ernie4_5ForCausalLM"
    theta = 500000.0
    fields = {
        **without(Llama.fields, "attention.dropout"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 2),
        "attention.head_dim": ("head_dim", 128),
        "attention.qkv_bias": ("use_bias", False),
        "attention.out_bias": ("use_bias", False),
        "ffn.bias": ("use_bias", False),
        "head.tied": ("tie_word_embeddings", True),
    }
    fixed = {**Llama.fixed, "position.interleaved": True}


FAMILY = Ernie45()
