"""SmolLM3.  Hugging Face 2025; layers without positions after Yang et al. 2025, arXiv:2501.18795."""

from lm.errors import ConfigError
from lm.hf.families.llama import Llama
from lm.hf.io.family import without
from lm.nn.spacing import evenly, is_there
from lm.schema import Tree


class SmolLM3(Llama):
    """Llama without positions in every fourth layer."""

    name = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    theta = 2000000.0
    fields = {
        **without(Llama.fields, "attention.head_dim"),
        "attention.n_kv_heads": ("num_key_value_heads", 4),
        "head.tied": ("tie_word_embeddings", True),
    }
    further = ("no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types", "max_window_layers")
    fixed_there = {"pad_token_id": None}  # where none is told, transformers takes 128004
    respelled = ("no_rope_layers", "no_rope_layer_interval")

    def read(self, hf: Tree) -> Tree:
        n, every = hf["num_hidden_layers"], hf.get("no_rope_layer_interval", 4)
        rotates = hf.get("no_rope_layers") or self._rotates(n, every)
        every, at = evenly({layer: not one for layer, one in enumerate(rotates)}) or (None, None)
        if rotates != self._rotates(n, every, at) or every == 1:
            raise ConfigError(f"config.json: no_rope_layers={rotates} are not 0 in every n-th layer, with n over 1. Import another model.")
        if hf.get("use_sliding_window") and "sliding_attention" in (hf.get("layer_types") or ["sliding_attention"]):
            raise ConfigError("config.json: use_sliding_window is set, and lm's smollm3 has no windows. Import another model.")
        return {"position.none_every": every, "position.none_at": at}

    def write(self, ours: Tree) -> Tree:
        n = ours["n_layers"]
        rotates = self._rotates(n, ours.get("position.none_every"), ours.get("position.none_at"))
        return {"no_rope_layers": rotates, "layer_types": ["full_attention"] * n}

    @staticmethod
    def _rotates(n_layers: int, every: int | None, at: int | None = None) -> list[int]:
        """Returns for each layer 1 where it rotates, else 0."""
        return [int(not is_there(layer, every, at)) for layer in range(n_layers)]


FAMILY = SmolLM3()
