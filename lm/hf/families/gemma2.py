"""Gemma 2.  arXiv:2408.00118."""

import math
from collections.abc import Iterator
from typing import ClassVar

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, sandwich, without
from lm.hf.options.windows import WINDOW_KEYS, layer_types, read_windows, write_windows
from lm.schema import Tree


class Gemma2(Llama):
    """Norms before and behind the sublayers, soft-caps, scaled embeddings, and a window in every second layer."""

    name = "gemma2"
    architecture = "Gemma2ForCausalLM"
    pattern: ClassVar[int] = 2  # every so many layers one has no window
    fields = {
        **without(Llama.fields, "ffn.bias"),
        "attention.n_kv_heads": ("num_key_value_heads", 4),
        "attention.head_dim": ("head_dim", 256),
        "ffn.activation": ("hidden_activation", "gelu_pytorch_tanh"),
        "attention.softcap": ("attn_logit_softcapping", 50.0),
        "head.softcap": ("final_logit_softcapping", 30.0),
        "head.tied": ("tie_word_embeddings", True),
    }
    further: ClassVar[tuple[str, ...]] = (*WINDOW_KEYS, "hidden_act", "query_pre_attn_scalar")
    fixed = {**Llama.fixed, "norm.place": "sandwich", "norm.zero_centered": True}
    fixed_there = {"use_bidirectional_attention": False}

    def read(self, hf: Tree) -> Tree:
        return {
            "attention.scale": hf.get("query_pre_attn_scalar", 256) ** -0.5,
            "embed.scale": math.sqrt(hf["hidden_size"]),
            **read_windows(hf, layer_types(hf["num_hidden_layers"], hf.get("sliding_window_pattern", self.pattern)), 4096),
        }

    def write(self, ours: Tree) -> Tree:
        return {"query_pre_attn_scalar": round(ours["attention.scale"] ** -2), **write_windows(ours)}

    def norms(self, here: str, there: str) -> Iterator[Pair]:
        return sandwich(here, there, ("input", "post_attention"), ("pre_feedforward", "post_feedforward"))


FAMILY = Gemma2(even_heads=True)
