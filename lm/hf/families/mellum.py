"""Mellum 2.  JetBrains 2026, "Mellum2-12B-A2.5B"."""

from lm.errors import ConfigError
from lm.hf.families.qwen3_moe import Qwen3MoE
from lm.hf.io.family import activation, without
from lm.hf.options.pattern import read_first_dense, write_first_dense
from lm.hf.options.windows import FULL, SLIDING, WINDOW_KEYS, read_windows, write_windows
from lm.schema import Tree


class Mellum(Qwen3MoE):
    """Qwen3 with experts, windows in some layers, and a rotary base of their own there."""

    name = "mellum"
    architecture = "MellumForCausalLM"
    theta = 500000.0
    local_theta = 10000.0
    older_ropes = False
    ignored = (*Qwen3MoE.ignored, r"mtp\..*")  # predicts a further token; transformers leaves it out, too
    fields = {
        **without(Qwen3MoE.fields, "ffn.every"),
        "attention.head_dim": ("head_dim", 128),
        "ffn.expert.hidden": ("moe_intermediate_size", 896),
        "ffn.n_experts": ("num_local_experts", 64),
        "ffn.router.normalize": ("norm_topk_prob", True),
    }
    renamed = {"num_experts": "num_local_experts"}
    further = (*WINDOW_KEYS, "mlp_layer_types", "intermediate_size")
    idle = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types", "use_sliding_window")

    def read(self, hf: Tree) -> Tree:
        if (part := ((hf.get("rope_parameters") or {}).get(SLIDING) or {}).get("partial_rotary_factor")) not in (None, 1.0):
            raise ConfigError(
                f"config.json: partial_rotary_factor={part} of windowed layers means nothing in lm's mellum, which rotates whole heads."
                " Import another model."
            )
        first = read_first_dense(hf, 0)
        dense: Tree = {"ffn.dense": None}
        if first:
            dense = {"ffn.dense.hidden": hf.get("intermediate_size", 7168), "ffn.dense.activation": activation(hf, "hidden_act", "silu")}
        return {**read_windows(hf, [FULL] * hf["num_hidden_layers"], 1024), "ffn.first_dense": first, **dense}

    def write(self, ours: Tree) -> Tree:
        dense = {"intermediate_size": ours["ffn.dense.hidden"]} if ours["ffn.first_dense"] else {}
        return {"mlp_layer_types": write_first_dense(ours), **write_windows(ours), **dense}


FAMILY = Mellum()
