"""Qwen1.5-MoE and Qwen2-MoE.  Yang et al. 2024, arXiv:2407.10671."""

from collections.abc import Iterator
from typing import ClassVar

from lm.hf.families.qwen3 import Qwen3
from lm.hf.families.qwen3_moe import Qwen3MoE
from lm.hf.io.family import Pair, same, without
from lm.hf.options.windows import FULL, SLIDING, WINDOW_KEYS
from lm.schema import Tree


class Qwen2MoE(Qwen3MoE):
    """Biases on queries, keys and values, windows in some layers, and beside the experts one that every token passes, behind a gate."""

    name = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    fields = {
        **without(Qwen3MoE.fields, "*head_dim", "*out_bias"),
        "attention.n_kv_heads": ("num_key_value_heads", 16),
        "attention.qkv_bias": ("qkv_bias", True),
        "ffn.expert.hidden": ("moe_intermediate_size", 1408),
        "ffn.shared_hidden": ("shared_expert_intermediate_size", 5632),
        "ffn.top_k": ("num_experts_per_tok", 4),
    }
    further: ClassVar[tuple[str, ...]] = (*Qwen3MoE.further, *WINDOW_KEYS)
    fixed = {
        **without(Qwen3MoE.fixed, "attention.qk_norm"), "attention.out_bias": False,
        "ffn.n_shared": 1, "ffn.shared_gate": True,
    }  # fmt: skip

    def read(self, hf: Tree) -> Tree:
        first = hf.get("max_window_layers", 28) if hf.get("use_sliding_window", False) else 0
        usual = [SLIDING if layer < first and layer % 2 == 0 else FULL for layer in range(hf["num_hidden_layers"])]  # not Qwen3's
        windows = Qwen3.read(self, {**hf, "layer_types": hf.get("layer_types") or usual})
        return super().read({"num_experts": 60, "intermediate_size": 5632, **hf}) | windows

    def write(self, ours: Tree) -> Tree:
        return super().write(ours) | Qwen3.write(self, ours)

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from super().ffn(here, there, ours)
        yield same(f"{here}.ffn.shared_gate.weight", f"{there}.mlp.shared_expert_gate.weight")
        for name in ("gate", "up", "down"):
            yield same(f"{here}.ffn.shared.{name}.weight", f"{there}.mlp.shared_expert.{name}_proj.weight")


FAMILY = Qwen2MoE()
