"""Mistral.  Jiang et al. 2023, arXiv:2310.06825."""

from lm.hf.families.llama import Llama


class Mistral(Llama):
    """Llama without biases, and with a window in every layer."""

    name = "mistral"
    architecture = "MistralForCausalLM"
    fields = {
        **{ours: theirs for ours, theirs in Llama.fields.items() if not ours.endswith("bias")},
        "attention.n_kv_heads": ("num_key_value_heads", 8),
        "attention.window": ("sliding_window", 4096),
    }


FAMILY = Mistral()
