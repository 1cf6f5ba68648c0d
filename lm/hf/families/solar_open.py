"""Solar Open.  Upstage 2026; the mixture of DeepSeek-V3, arXiv:2412.19437."""

from lm.hf.families.deepseek_moe import DeepSeekMoE
from lm.hf.io.family import without
from lm.schema import Tree


class SolarOpen(DeepSeekMoE):
    """Llama's attention, and DeepSeek-V3's experts in every layer."""

    name = "solar_open"
    architecture = "SolarOpenForCausalLM"
    rare = True
    theta = 1e6
    fields = {
        **without(DeepSeekMoE.fields, "attention.out_bias", "ffn.first_dense"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
        "attention.head_dim": ("head_dim", 128),
        "ffn.expert.hidden": ("moe_intermediate_size", 1280),
    }

    def read(self, hf: Tree) -> Tree:
        return super().read({**hf, "first_k_dense_replace": 0})

    def write(self, ours: Tree) -> Tree:
        return {}


FAMILY = SolarOpen()
