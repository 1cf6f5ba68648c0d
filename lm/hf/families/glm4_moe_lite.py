"""GLM-4.7-Flash.  GLM team 2026; the mixture and the latent attention of DeepSeek-V3, arXiv:2412.19437."""

from lm.errors import ConfigError
from lm.hf.families.deepseek_v3 import DeepSeekV3
from lm.hf.io.family import without
from lm.schema import Tree

_DENSE, _SPARSE = "dense", "sparse"


class GLM4MoELite(DeepSeekV3):
    """DeepSeek-V3 whose file names for each layer whether it has experts."""

    name = "glm4_moe_lite"
    architecture = "Glm4MoeLiteForCausalLM"
    usual_dense = 10240
    fields = {
        **without(DeepSeekV3.fields, "ffn.first_dense"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.q_rank": ("q_lora_rank", 768),
        "attention.nope_dim": ("qk_nope_head_dim", 192),
        "attention.v_dim": ("v_head_dim", 256),
        "ffn.expert.hidden": ("moe_intermediate_size", 1536),
        "ffn.n_experts": ("n_routed_experts", 64),
        "ffn.top_k": ("num_experts_per_tok", 4),
        "ffn.router.n_groups": ("n_group", 1),
        "ffn.router.top_groups": ("topk_group", 1),
        "ffn.router.scale": ("routed_scaling_factor", 1.8),
    }
    further = (*DeepSeekV3.further, "mlp_layer_types", "first_k_dense_replace")

    def read(self, hf: Tree) -> Tree:
        n = hf["num_hidden_layers"]
        types = hf.get("mlp_layer_types") or [_DENSE, *[_SPARSE] * (n - 1)]
        first = types.index(_SPARSE) if _SPARSE in types else n
        if types != self.layer_types(n, first):
            raise ConfigError(f"config.json: mlp_layer_types={types} are not dense ones and behind them sparse ones. Import another model.")
        return {**super().read({"qk_nope_head_dim": 192, **hf, "first_k_dense_replace": first}), "ffn.first_dense": first}

    def layer_types(self, n: int, first: int) -> list[str]:
        """Returns mlp_layer_types of n layers, of which the first ones are dense."""
        return [_DENSE] * first + [_SPARSE] * (n - first)

    def write(self, ours: Tree) -> Tree:
        """Of two keys for one thing transformers reads the first, vLLM and SGLang the second."""
        first = ours["ffn.first_dense"]
        return {**super().write(ours), "mlp_layer_types": self.layer_types(ours["n_layers"], first), "first_k_dense_replace": first}


FAMILY = GLM4MoELite()
