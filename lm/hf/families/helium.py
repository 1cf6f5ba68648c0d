"""Helium 1.  Kyutai 2025, "Helium 1: a modular and multilingual LLM"."""

from lm.errors import ConfigError
from lm.hf.families.llama import Llama
from lm.hf.io.family import without
from lm.schema import Tree


class Helium(Llama):
    """Llama whose heads rotate neighbours."""

    name = "helium"
    architecture = "HeliumForCausalLM"
    rare = True
    theta = 100000.0
    fields = {
        **without(Llama.fields, "attention.out_bias"),
        "norm.eps": ("rms_norm_eps", 1e-8),
        "attention.n_kv_heads": ("num_key_value_heads", 20),
        "attention.head_dim": ("head_dim", 128),
    }
    fixed = {**Llama.fixed, "position.interleaved": True}

    def read(self, hf: Tree) -> Tree:
        if (width := hf["num_attention_heads"] * hf.get("head_dim", 128)) != hf["hidden_size"]:
            raise ConfigError(f"config.json: the heads of a {self.name} are as wide together as hidden_size={hf['hidden_size']}, and not"
                              f" {width}. Correct head_dim.")  # fmt: skip
        return {}


FAMILY = Helium()
