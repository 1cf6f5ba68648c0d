"""EXAONE 4.0.  LG AI Research 2025, arXiv:2507.11407."""

from lm.hf.families.olmo2 import OLMo2
from lm.hf.io.family import without
from lm.hf.options.windows import FULL, WINDOW_KEYS, layer_types, read_rotating_windows, read_windows, write_windows
from lm.schema import Tree


class Exaone4(OLMo2):
    """Norms behind the sublayers and on each head's queries and keys; where there are windows, layers without one do not rotate."""

    name = "exaone4"
    architecture = "Exaone4ForCausalLM"
    fields = {
        **without(OLMo2.fields, "*bias"),
        "attention.n_kv_heads": ("num_key_value_heads", 32),
    }
    further = (*WINDOW_KEYS, "sliding_window_pattern")
    respelled = ("sliding_window_pattern",)
    fixed = {**OLMo2.fixed, "attention.qk_norm": "head"}

    def read(self, hf: Tree) -> Tree:
        """As transformers, looks at sliding_window_pattern where there are no layer_types; without sliding_window all layers rotate."""
        n_layers, window = hf["num_hidden_layers"], hf.get("sliding_window", 4096)
        if window is None:
            return read_windows(hf, layer_types(n_layers, 1), None)
        every = 4 if hf.get("layer_types") else hf.get("sliding_window_pattern", 4)
        return read_rotating_windows(hf, layer_types(n_layers, every), window)

    def write(self, ours: Tree) -> Tree:
        """sliding_window_pattern is for MLX, which looks at no layer_types."""
        there: Tree = {"sliding_window": None, **write_windows(ours)}
        letters = "".join("G" if kind == FULL else "L" for kind in there["layer_types"])
        return {**there, "sliding_window_pattern": letters if there["sliding_window"] is not None else None}


FAMILY = Exaone4()
