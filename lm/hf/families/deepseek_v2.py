"""DeepSeek-V2.  arXiv:2405.04434."""

from lm.errors import ConfigError
from lm.hf.families.deepseek_moe import MTP_LAYERS
from lm.hf.families.deepseek_v3 import DeepSeekV3
from lm.hf.io.family import activation, without
from lm.schema import Tree


class DeepSeekV2(DeepSeekV3):
    """DeepSeek-V3 with a softmax over experts, whose weights do not sum to 1, groups chosen by their best one, and no further tokens."""

    name = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    fields = {
        **without(DeepSeekV3.fields, "ffn.router.normalize", "position.interleaved", "*group*"),
        "ffn.n_experts": ("n_routed_experts", 64),
        "ffn.n_shared": ("n_shared_experts", 2),
        "ffn.top_k": "num_experts_per_tok",
        "ffn.first_dense": ("first_k_dense_replace", 0),
        "ffn.expert.hidden": ("moe_intermediate_size", 1407),
        "ffn.router.scale": ("routed_scaling_factor", 1.0),
    }
    further = (*(key for key in DeepSeekV3.further if key != MTP_LAYERS), "topk_method", "n_group", "topk_group")
    respelled = ("topk_method", "n_group", "topk_group")
    renamed = {}
    fixed = {**DeepSeekV3.fixed, "ffn.router.kind": "softmax", "ffn.router.normalize": False, "position.interleaved": True, "mtp": None}
    fixed_there = {"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False}

    def read(self, hf: Tree) -> Tree:
        if not hf.get("n_shared_experts", 2):
            raise ConfigError("config.json: n_shared_experts=0 has no form in transformers, which wants one or more.")
        if (method := hf.get("topk_method", "greedy")) not in _METHODS:
            raise ConfigError(f"config.json: topk_method={method!r} is not known. Known are {' and '.join(_METHODS)}.")
        for key in ("kv_lora_rank", "qk_nope_head_dim"):
            if hf.get(key, 2) % 2:
                raise ConfigError(f"config.json: {key}={hf[key]} is odd, and transformers rotates what stands behind an even number only.")
        dense: Tree = {"ffn.dense": None}
        if hf.get("first_k_dense_replace", 0):
            dense = {"ffn.dense.hidden": hf.get("intermediate_size", 11008), "ffn.dense.activation": activation(hf, "hidden_act", "silu")}
        if method == _METHODS[1]:
            self._require_groups(hf)
        groups = (hf["n_group"], hf["topk_group"]) if method == _METHODS[1] else (1, 1)
        return {**dense, "ffn.router.n_groups": groups[0], "ffn.router.top_groups": groups[1], **self._scale(hf)}

    def write(self, ours: Tree) -> Tree:
        there = without(super().write(ours), MTP_LAYERS)
        groups, top = ours["ffn.router.n_groups"], ours["ffn.router.top_groups"]
        return {**there, "topk_method": _METHODS[groups > 1], "n_group": groups, "topk_group": top}


_METHODS = ("greedy", "group_limited_greedy")
FAMILY = DeepSeekV2(even_heads=True)
