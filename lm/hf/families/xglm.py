"""XGLM.  Lin et al. 2021, arXiv:2112.10668."""

import math

from lm.hf.families.opt import OPT
from lm.schema import Tree

FAIRSEQ = {"position.kind": "sinusoidal", "position.theta": 10000.0, "position.halves": True, "position.exact": True, "position.first": 2}
"""Its sines, whose first two rows are of padding."""


class XGLM(OPT):
    """OPT with sines and cosines for positions, and a scaled embedding."""

    name = "xglm"
    architecture = "XGLMForCausalLM"
    pad = 1
    stack = ("model", "layer_norm", "lm_head")
    fields = {
        "vocab_size": ("vocab_size", 256008),
        "max_seq_len": ("max_position_embeddings", 2048),
        "d_model": ("d_model", 1024),
        "n_layers": ("num_layers", 24),
        "attention.n_heads": ("attention_heads", 16),
        "attention.dropout": ("attention_dropout", 0.1),
        "ffn.hidden": ("ffn_dim", 4096),
        "ffn.activation": ("activation_function", "gelu"),
        "ffn.dropout": ("activation_dropout", 0.0),
        "dropout": ("dropout", 0.1),
        "head.tied": ("tie_word_embeddings", True),
    }
    further = ("scale_embedding", "layerdrop")
    fixed = {**OPT.fixed, "norm.place": "pre", **FAIRSEQ, "attention.qkv_bias": True, "attention.out_bias": True, "ffn.bias": True}
    fixed_there = {"add_cross_attention": False}

    def read(self, hf: Tree) -> Tree:
        return {"embed.scale": math.sqrt(hf.get("d_model", 1024)) if hf.get("scale_embedding", True) else 1.0}

    def write(self, ours: Tree) -> Tree:
        return {"scale_embedding": ours["embed.scale"] != 1.0}


FAMILY = XGLM()
