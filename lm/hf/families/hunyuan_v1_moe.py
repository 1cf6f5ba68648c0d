"""HunYuan with experts: A13B.  Tencent 2025, "Hunyuan-A13B technical report"."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.hunyuan_v1_dense import HunYuanDense
from lm.hf.io.family import Pair, gated, same, without
from lm.schema import Tree


class HunYuanMoE(HunYuanDense):
    """HunYuan with a mixture of experts in every layer, beside one as wide that every token passes."""

    name = "hunyuan_v1_moe"
    architecture = "HunYuanMoEV1ForCausalLM"
    fields = {
        **without(HunYuanDense.fields, "ffn.*"),
        "ffn.expert.hidden": "intermediate_size",
        "ffn.expert.activation": ("hidden_act", "silu"),
        "ffn.n_experts": ("num_experts", 1),
    }
    further = ("moe_topk",)
    respelled = ("moe_topk",)  # files have it for each layer, too
    idle = (
        *(key for key in HunYuanDense.idle if key != "num_experts"), "moe_intermediate_size", "moe_layer_num_skipped", "num_shared_expert",
        "use_mixed_mlp_moe", "group_limited_greedy", "n_group", "topk_group", "norm_topk_prob",
    )  # fmt: skip
    fixed = {
        **without(HunYuanDense.fixed, "ffn.*"), "ffn.kind": "moe",
        "ffn.expert.gated": True, "ffn.router.kind": "softmax", "ffn.n_shared": 1,
    }  # fmt: skip

    def read(self, hf: Tree) -> Tree:
        told = hf.get("moe_topk", 1)
        counts = set(told if isinstance(told, list) else [told])
        if len(counts) != 1:
            raise ConfigError(f"config.json: moe_topk={told} is not the same in all layers, as it is in lm. Import another model.")
        width, widths = hf["intermediate_size"], hf.get("moe_intermediate_size") or [hf["intermediate_size"]]
        if set(widths if isinstance(widths, list) else [widths]) != {width}:
            raise ConfigError(f"config.json: moe_intermediate_size={widths} is not intermediate_size={width}, at which transformers looks.")
        return {"ffn.top_k": counts.pop()}

    def write(self, ours: Tree) -> Tree:
        return {"moe_topk": ours["ffn.top_k"]}

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for pair in gated(f"{here}.ffn", f"{there}.mlp", ours["ffn.n_experts"]):
            yield same(pair.ours[0], f"{there}.mlp.gate.wg.weight") if pair.ours[0].endswith("router.weight") else pair
        for name in ("gate", "up", "down"):
            yield same(f"{here}.ffn.shared.{name}.weight", f"{there}.mlp.shared_mlp.{name}_proj.weight")


FAMILY = HunYuanMoE()
