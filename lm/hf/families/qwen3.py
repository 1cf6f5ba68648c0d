"""Qwen3, dense.  Yang et al. 2025, arXiv:2505.09388."""

from typing import ClassVar

from lm.hf.families.llama import Llama
from lm.hf.io.family import without
from lm.hf.options.windows import FULL, SLIDING, WINDOW_KEYS, read_windows, write_windows
from lm.schema import Tree


class Qwen3(Llama):
    """Llama with a norm on each head's queries and keys."""

    name = "qwen3"
    architecture = "Qwen3ForCausalLM"
    fields = {
        **without(Llama.fields, "ffn.bias"),
        "attention.n_kv_heads": ("num_key_value_heads", 32),
        "attention.head_dim": ("head_dim", 128),
    }
    further: ClassVar[tuple[str, ...]] = (*WINDOW_KEYS, "use_sliding_window", "max_window_layers")
    fixed = {**Llama.fixed, "attention.qk_norm": "head"}

    def read(self, hf: Tree) -> Tree:
        window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None
        first = hf.get("max_window_layers", 28)
        usual = [SLIDING if window is not None and layer >= first else FULL for layer in range(hf["num_hidden_layers"])]
        said_by = "layer_types" if hf.get("layer_types") else "max_window_layers"
        return read_windows({**hf, "sliding_window": window}, usual, window, said_by)

    def write(self, ours: Tree) -> Tree:
        windows = write_windows(ours)
        return {**windows, **({"use_sliding_window": True} if "sliding_window" in windows else {})}


FAMILY = Qwen3()
