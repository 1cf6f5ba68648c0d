"""LFM2 with experts.  Liquid AI 2025, arXiv:2511.23404."""

from collections.abc import Iterator

from lm.hf.families.lfm2 import LFM2
from lm.hf.io.family import Pair, experts, same, without
from lm.hf.options.pattern import read_pattern
from lm.schema import Tree


class LFM2MoE(LFM2):
    """LFM2 with experts behind the first layers, chosen by sigmoid scores and a bias that corrects the choice."""

    name = "lfm2_moe"
    architecture = "Lfm2MoeForCausalLM"
    renamed = {"tie_embedding": "tie_word_embeddings"}
    fields = {
        **without(LFM2.fields, "ffn.*"),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
        "ffn.expert.hidden": ("moe_intermediate_size", 1792),
        "ffn.n_experts": ("num_experts", 32),
        "ffn.top_k": ("num_experts_per_tok", 4),
        "ffn.first_dense": ("num_dense_layers", 2),
        "ffn.router.normalize": ("norm_topk_prob", True),
        "ffn.router.scale": ("routed_scaling_factor", 1.0),
    }
    further = ("layer_types", "conv_L_cache", "intermediate_size")
    respelled = ("layer_types",)
    fixed = {
        **without(LFM2.fixed, "ffn.*"), "ffn.kind": "moe", "ffn.expert.gated": True,
        "ffn.expert.activation": "silu", "ffn.router.kind": "sigmoid", "ffn.router.floor": 1e-6,
    }  # fmt: skip
    fixed_there = {"conv_bias": False, "use_expert_bias": True}

    def read(self, hf: Tree) -> Tree:
        pattern = read_pattern(hf["layer_types"], hf["num_hidden_layers"], ("conv",))
        conv = {"recurrent": {"kind": "short_conv", "kernel": hf.get("conv_L_cache", 3)}} if "recurrent" in pattern else {}
        if not hf.get("num_dense_layers", 2):
            return {"pattern": pattern, **conv, "ffn.dense": None}
        return {"pattern": pattern, **conv, "ffn.dense.hidden": hf.get("intermediate_size", 7168), "ffn.dense.activation": "silu"}

    def write(self, ours: Tree) -> Tree:
        there = {key: value for key, value in super().write(ours).items() if key in self.further}
        return {**there, **({"intermediate_size": ours["ffn.dense.hidden"]} if ours["ffn.first_dense"] else {})}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from super().block(here, there, ours)
        yield same(f"{here}.ffn.router.weight", f"{there}.feed_forward.gate.weight")
        yield same(f"{here}.ffn.router.correction_bias", f"{there}.feed_forward.expert_bias")
        for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            yield experts(f"{here}.ffn.experts.{name}", f"{there}.feed_forward.experts.*.{theirs}.weight", ours["ffn.n_experts"])


FAMILY = LFM2MoE()
