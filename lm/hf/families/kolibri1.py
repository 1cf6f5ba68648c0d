"""Kolibri 1.  Aleph Alpha 2026."""

import re
from collections.abc import Iterator

from lm.hf.families.deepseek_moe import DeepSeekMoE
from lm.hf.io.family import Pair, sandwich, without
from lm.hf.options.windows import WINDOW_KEYS, layer_types, read_rotating_windows, write_windows
from lm.schema import Tree


class Kolibri1(DeepSeekMoE):
    """Experts chosen by logits, norms before and behind the sublayers and on heads, and no rotation outside of windows."""

    name = "kolibri1"
    architecture = "Kolibri1ForCausalLM"
    renamed = {"num_experts": "num_local_experts"}
    fields = {
        **without(DeepSeekMoE.fields, "ffn.*", "*_bias"),
        "attention.n_kv_heads": ("num_key_value_heads", 4),
        "attention.head_dim": ("head_dim", 128),
        "ffn.expert.activation": ("hidden_act", "silu"),
        "ffn.expert.hidden": ("moe_intermediate_size", 512),
        "ffn.n_experts": ("num_local_experts", 384),
        "ffn.top_k": ("num_experts_per_tok", 6),
        "ffn.shared_hidden": ("shared_expert_intermediate_size", 512),
        "ffn.router.normalize": ("norm_topk_prob", False),
    }
    further = WINDOW_KEYS
    idle = ("intermediate_size",)
    fixed = {
        **DeepSeekMoE.fixed, "norm.place": "sandwich", "attention.qk_norm": "head", "attention.qkv_bias": False,
        "attention.out_bias": False, "ffn.n_shared": 1, "ffn.router.corrected": "logits", "ffn.router.floor": 0.0,
    }  # fmt: skip
    fixed_there = {}

    def read(self, hf: Tree) -> Tree:
        return read_rotating_windows(hf, layer_types(hf["num_hidden_layers"], 5), 513)

    def write(self, ours: Tree) -> Tree:
        return write_windows(ours)

    def norms(self, here: str, there: str) -> Iterator[Pair]:
        for pair in sandwich(here, there, ("input", "post_attn"), ("post_attention", "post_ffn")):
            yield pair.renamed(lambda key: re.sub("(post_attn|post_ffn)_layernorm", r"\1_norm", key))

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for pair in super().ffn(here, there, ours):
            yield pair.renamed(lambda key: key.replace("mlp.gate.e_score_correction_bias", "moe.router.expert_bias"))


FAMILY = Kolibri1()
