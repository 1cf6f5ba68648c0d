"""Code World Model.  Meta 2025, arXiv:2510.02387."""

from lm.hf.families.llama import Llama
from lm.hf.io.family import without
from lm.hf.options.windows import WINDOW_KEYS, layer_types, read_windows, write_windows
from lm.schema import Tree


class Cwm(Llama):
    """Llama with a window in all layers but the first of every four."""

    name = "cwm"
    architecture = "CwmForCausalLM"
    rare = True
    theta = 1000000.0
    usual_rope = {
        "rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    fields = {
        **without(Llama.fields, "attention.*bias"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
        "attention.head_dim": ("head_dim", 128),
    }
    further = WINDOW_KEYS

    def read(self, hf: Tree) -> Tree:
        return read_windows(hf, layer_types(hf["num_hidden_layers"], 4, 0), 8192)

    def write(self, ours: Tree) -> Tree:
        return write_windows(ours)


FAMILY = Cwm(even_heads=True)
