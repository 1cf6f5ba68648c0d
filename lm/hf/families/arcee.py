"""Arcee's AFM.  Arcee AI 2025, "Announcing Arcee Foundation Models"."""

from lm.hf.families.llama import Llama


class Arcee(Llama):
    """Llama with a feed-forward without a gate, of relu squared."""

    name = "arcee"
    architecture = "ArceeForCausalLM"
    fields = {
        **Llama.fields,
        "norm.eps": ("rms_norm_eps", 1e-5),
        "ffn.activation": ("hidden_act", "relu2"),
    }
    fixed = {**Llama.fixed, "ffn.gated": False}


FAMILY = Arcee(even_heads=True)
