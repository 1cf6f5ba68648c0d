"""Jais 2.  MBZUAI, Inception and Cerebras 2025, "Jais-2-8B-Chat"."""

from lm.hf.families.llama import Llama


class Jais2(Llama):
    """Llama with layer norms, biases, and a feed-forward without a gate, of relu squared."""

    name = "jais2"
    architecture = "Jais2ForCausalLM"
    rare = True
    fields = {
        **Llama.fields,
        "norm.eps": ("layer_norm_eps", 1e-5),
        "attention.qkv_bias": ("attention_bias", True),
        "attention.out_bias": ("attention_bias", True),
        "ffn.activation": ("hidden_act", "relu2"),
        "ffn.bias": ("mlp_bias", True),
    }
    fixed = {**Llama.fixed, "norm.kind": "layer", "ffn.gated": False}


FAMILY = Jais2(even_heads=True)
