"""BioGPT.  Luo et al. 2022, arXiv:2210.10341."""

import math

from lm.hf.families.opt import OPT
from lm.schema import Tree


class BioGPT(OPT):
    """OPT with GELU and a scaled embedding."""

    name = "biogpt"
    architecture = "BioGptForCausalLM"
    prefix = "biogpt."
    stack = ("biogpt", "layer_norm", "output_projection")
    fields = {
        "vocab_size": ("vocab_size", 42384),
        "max_seq_len": ("max_position_embeddings", 1024),
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "attention.n_heads": "num_attention_heads",
        "attention.dropout": ("attention_probs_dropout_prob", 0.1),
        "ffn.hidden": "intermediate_size",
        "ffn.activation": ("hidden_act", "gelu"),
        "ffn.dropout": ("activation_dropout", 0.0),
        "dropout": ("hidden_dropout_prob", 0.1),
        "head.tied": ("tie_word_embeddings", True),
    }
    further = ("scale_embedding", "layerdrop")
    idle = ("layer_norm_eps",)  # its norms have torch's
    fixed = {**OPT.fixed, "norm.place": "pre", "attention.qkv_bias": True, "attention.out_bias": True, "ffn.bias": True}
    fixed_there = {}

    def read(self, hf: Tree) -> Tree:
        return {"embed.scale": math.sqrt(hf["hidden_size"]) if hf.get("scale_embedding", True) else 1.0}

    def write(self, ours: Tree) -> Tree:
        return {"scale_embedding": ours["embed.scale"] != 1.0}


FAMILY = BioGPT()
