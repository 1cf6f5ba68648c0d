"""Hy3.  Tencent 2026, "Hy3-preview"."""

from collections.abc import Iterator

from lm.hf.families.deepseek_moe import DeepSeekMoE
from lm.hf.io.family import Pair, without
from lm.hf.options.pattern import read_first_dense, write_first_dense
from lm.schema import Tree


class HY3(DeepSeekMoE):
    """DeepSeek-V3's experts without groups, behind grouped queries with norms on heads."""

    name = "hy_v3"
    architecture = "HYV3ForCausalLM"
    theta = 11_158_840.0
    fields = {
        **without(DeepSeekMoE.fields, "ffn.*"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
        "attention.head_dim": ("head_dim", 128),
        "ffn.expert.activation": ("hidden_act", "silu"),
        "ffn.expert.hidden": ("moe_intermediate_size", 1536),
        "ffn.n_experts": ("num_experts", 192),
        "ffn.n_shared": ("num_shared_experts", 1),
        "ffn.top_k": ("num_experts_per_tok", 8),
        "ffn.router.scale": ("router_scaling_factor", 2.826),
    }
    usual_dense = 13312
    further = (*DeepSeekMoE.further, "mlp_layer_types", "first_k_dense_replace")
    idle = ("enable_moe_fp32_combine", "expert_hidden_dim", "num_nextn_predict_layers")
    fixed = {**DeepSeekMoE.fixed, "attention.qk_norm": "head", "ffn.router.normalize": True}
    fixed_there = {"mlp_bias": False, "qk_norm": True, "route_norm": True}

    def ignores(self, hf: Tree) -> tuple[str, ...]:
        """Its block that predicts a further token is a layer after the last one."""
        return (*self.ignored, rf"model\.layers\.{hf['num_hidden_layers']}\..*")

    def read(self, hf: Tree) -> Tree:
        first = read_first_dense(hf, 1)
        return {**super().read({**hf, "first_k_dense_replace": first, "n_group": 1}), "ffn.first_dense": first}

    def write(self, ours: Tree) -> Tree:
        """Of two keys for one thing transformers reads the first, vLLM and SGLang the second."""
        dense = {"mlp_layer_types": write_first_dense(ours), "first_k_dense_replace": ours["ffn.first_dense"]}
        return {**super().write(ours), **dense, "expert_hidden_dim": ours["ffn.expert.hidden"]}

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        renamed = {"gate.weight": "router.gate.weight", "gate.e_score_correction_bias": "expert_bias"}
        for pair in super().ffn(here, there, ours):
            ends = [key.removeprefix(f"{there}.mlp.") for key in pair.theirs]
            yield pair._replace(
                theirs=tuple(f"{there}.mlp.{renamed.get(key, key.replace('shared_experts', 'shared_mlp'))}" for key in ends)
            )


FAMILY = HY3()
