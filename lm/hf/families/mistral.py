"""Mistral.  Jiang et al. 2023, arXiv:2310.06825."""

from lm.hf.families.llama import Llama
from lm.hf.io.family import without


class Mistral(Llama):
    """Llama without biases, and with a window in every layer."""

    name = "mistral"
    architecture = "MistralForCausalLM"
    fields = {
        **without(Llama.fields, "*bias"),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
        "attention.window": ("sliding_window", 4096),
    }


FAMILY = Mistral()
