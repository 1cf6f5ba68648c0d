"""GLM-4.5 to 4.7.  GLM team 2025, arXiv:2508.06471."""

from lm.hf.families.deepseek_moe import FurtherTokens
from lm.hf.io.family import without
from lm.schema import Tree


class GLM4MoE(FurtherTokens):
    """DeepSeek-V3's experts and further tokens behind grouped queries, of each head half rotated, with norms on heads or without."""

    name = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    partial = 0.5
    usual_dense = 10944
    fields = {
        **without(FurtherTokens.fields, "attention.out_bias"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
    }
    further = (*FurtherTokens.further, "use_qk_norm")

    def read(self, hf: Tree) -> Tree:
        norm = "head" if hf.get("use_qk_norm", False) else "none"
        return {**super().read(hf), "attention.qk_norm": norm}

    def write(self, ours: Tree) -> Tree:
        return {**super().write(ours), "use_qk_norm": ours["attention.qk_norm"] == "head"}


FAMILY = GLM4MoE()
