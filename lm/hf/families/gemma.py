"""Gemma 1.  arXiv:2403.08295."""

import math

from lm.hf.families.llama import Llama
from lm.hf.io.family import without
from lm.schema import Tree


class Gemma(Llama):
    """Llama with norms whose weight is the difference from 1, scaled embeddings and wide heads."""

    name = "gemma"
    architecture = "GemmaForCausalLM"
    fields = {
        **without(Llama.fields, "ffn.bias"),
        "attention.n_kv_heads": ("num_key_value_heads", 16),
        "attention.head_dim": ("head_dim", 256),
        "ffn.activation": ("hidden_act", "gelu_pytorch_tanh"),
        "head.tied": ("tie_word_embeddings", True),
    }
    idle = ("hidden_activation",)
    respelled = ("hidden_act",)
    fixed = {**Llama.fixed, "norm.zero_centered": True}
    fixed_there = {"use_bidirectional_attention": False}

    def read(self, hf: Tree) -> Tree:
        """As transformers, takes the first files' gelu for its tanh approximation, which these models were trained with."""
        approximate: Tree = {"ffn.activation": "gelu_tanh"} if hf.get("hidden_act") == "gelu" else {}
        return {**approximate, "embed.scale": math.sqrt(hf["hidden_size"])}


FAMILY = Gemma()
