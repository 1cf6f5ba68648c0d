"""K-EXAONE.  LG AI Research 2026, arXiv:2601.01739."""

from collections.abc import Iterator

from lm.hf.families.deepseek_moe import DeepSeekMoE
from lm.hf.io.family import Pair, without
from lm.hf.options.pattern import read_first_dense, write_first_dense
from lm.hf.options.windows import WINDOW_KEYS, layer_types, read_rotating_windows, write_windows
from lm.schema import Tree


class ExaoneMoE(DeepSeekMoE):
    """EXAONE 4's windows, outside of which nothing rotates, behind norms before the sublayers, and DeepSeek-V3's experts."""

    name = "exaone_moe"
    architecture = "ExaoneMoeForCausalLM"
    ignored = (*DeepSeekMoE.ignored, r"mtp\..*")  # predicts further tokens; transformers leaves it out, too
    fields = {
        **without(DeepSeekMoE.fields, "*_bias", "*first_dense"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 32),
        "ffn.expert.hidden": ("moe_intermediate_size", 1024),
        "ffn.n_experts": ("num_experts", 64),
        "ffn.n_shared": ("num_shared_experts", 1),
        "ffn.router.scale": ("routed_scaling_factor", 2.5),
    }
    usual_dense = 16384
    further = (
        *DeepSeekMoE.further,
        *WINDOW_KEYS,
        "sliding_window_pattern",
        "mlp_layer_types",
        "first_k_dense_replace",
    )
    idle = ("is_moe_layer", "num_nextn_predict_layers")
    fixed = {**DeepSeekMoE.fixed, "attention.qk_norm": "head", "attention.qkv_bias": False, "attention.out_bias": False}
    fixed_there = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}

    def read(self, hf: Tree) -> Tree:
        first = read_first_dense(hf, hf.get("first_k_dense_replace", 1))
        every = 4 if hf.get("layer_types") else hf.get("sliding_window_pattern", 4)
        windows = read_rotating_windows(hf, layer_types(hf["num_hidden_layers"], every), 4096)
        return {**super().read({**hf, "first_k_dense_replace": first}), **windows, "ffn.first_dense": first}

    def write(self, ours: Tree) -> Tree:
        first = {"mlp_layer_types": write_first_dense(ours), "first_k_dense_replace": ours["ffn.first_dense"]}
        return {**super().write(ours), **write_windows(ours), **first}

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for pair in super().ffn(here, there, ours):
            yield pair.renamed(lambda key: key.replace("mlp.gate.e_score", "mlp.e_score"))


FAMILY = ExaoneMoE()
