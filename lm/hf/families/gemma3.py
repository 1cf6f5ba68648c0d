"""Gemma 3, the text model.  arXiv:2503.19786."""

from lm.hf.families.gemma2 import Gemma2
from lm.hf.io.family import without


class Gemma3(Gemma2):
    """Gemma 2 with norms on each head's queries and keys, a window in all layers but every sixth, and a rotary base of its own in those."""

    name = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    theta = 1000000.0
    local_theta = 10000.0
    pattern = 6
    fields = {
        **without(Gemma2.fields, "attention.softcap"),
        "head.softcap": ("final_logit_softcapping", None),
    }
    further = (*Gemma2.further, "sliding_window_pattern")
    fixed = {**Gemma2.fixed, "attention.qk_norm": "head"}
    fixed_there = {**Gemma2.fixed_there, "attn_logit_softcapping": None}  # transformers does nothing by it


FAMILY = Gemma3(even_heads=True)
