"""Trinity (AFMoE).  Arcee AI 2025, "The Trinity manifesto"."""

import math
from collections.abc import Iterator

from lm.hf.families.deepseek_moe import DeepSeekMoE
from lm.hf.io.family import Pair, module, sandwich, without
from lm.hf.options.windows import WINDOW_KEYS, layer_types, read_rotating_windows, write_windows
from lm.schema import Tree


class AFMoE(DeepSeekMoE):
    """DeepSeek-V3's experts, norms before and behind the sublayers and on heads, gated attention, and no rotation outside of windows."""

    name = "afmoe"
    architecture = "AfmoeForCausalLM"
    fields = {
        **without(DeepSeekMoE.fields, "ffn.*", "*_bias"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.head_dim": ("head_dim", 128),
        "ffn.expert.activation": ("hidden_act", "silu"),
        "ffn.expert.hidden": ("moe_intermediate_size", 1408),
        "ffn.n_experts": ("num_experts", 64),
        "ffn.n_shared": ("num_shared_experts", 2),
        "ffn.top_k": ("num_experts_per_tok", 6),
        "ffn.first_dense": ("num_dense_layers", 1),
        "ffn.router.scale": ("route_scale", 1.0),
    }
    usual_dense = 6144
    further = (*DeepSeekMoE.further, *WINDOW_KEYS, "global_attn_every_n_layers", "mup_enabled")
    idle = ("load_balance_coeff", "use_grouped_mm")
    fixed = {
        **DeepSeekMoE.fixed, "norm.place": "sandwich", "attention.qk_norm": "head", "attention.out_gate": "element",
        "attention.qkv_bias": False, "attention.out_bias": False, "ffn.router.normalize": True,
    }  # fmt: skip
    fixed_there = {
        "attention_bias": False, "n_group": 1, "num_expert_groups": 1, "num_limited_groups": 1, "route_norm": True, "score_func": "sigmoid",
        "topk_group": 1,
    }  # fmt: skip

    def read(self, hf: Tree) -> Tree:
        usual = layer_types(hf["num_hidden_layers"], hf.get("global_attn_every_n_layers", 4))
        scale = math.sqrt(hf["hidden_size"]) if hf.get("mup_enabled", False) else 1.0
        return {**super().read({**hf, "n_group": 1, "topk_group": 1}), **read_rotating_windows(hf, usual, 1024), "embed.scale": scale}

    def write(self, ours: Tree) -> Tree:
        return {**super().write(ours), **write_windows(ours), "mup_enabled": ours["embed.scale"] != 1.0}

    def norms(self, here: str, there: str) -> Iterator[Pair]:
        yield from sandwich(here, there, ("input", "post_attention"), ("pre_mlp", "post_mlp"))
        yield from module(f"{here}.attention.gate", f"{there}.self_attn.gate_proj")

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        renamed = {f"{there}.mlp.gate.weight": "router.gate.weight", f"{there}.mlp.gate.e_score_correction_bias": "expert_bias"}
        for pair in super().ffn(here, there, ours):
            yield pair.renamed(lambda key: f"{there}.mlp.{renamed[key]}" if key in renamed else key)


FAMILY = AFMoE()
