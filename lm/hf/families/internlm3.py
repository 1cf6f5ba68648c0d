"""InternLM3.  Shanghai AI Laboratory 2025, "InternLM3-8B-Instruct"."""

from lm.errors import ConfigError
from lm.hf.families.llama import Llama
from lm.schema import Tree


class InternLM3(Llama):
    """Llama, with biases everywhere or nowhere."""

    name = "internlm3"
    fields = {
        **Llama.fields,
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 2),
        "attention.head_dim": ("head_dim", 128),
    }
    renamed = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}

    def read(self, hf: Tree) -> Tree:
        inner, outer = hf.get("attention_bias", False), hf.get("mlp_bias", False)
        if inner != outer:
            raise ConfigError(
                f"config.json: attention_bias={inner} and mlp_bias={outer} (qkv_bias and bias in first files): transformers has"
                f" {self.name} with both or neither. Import another model."
            )
        return {}


FAMILY = InternLM3(even_heads=True)
