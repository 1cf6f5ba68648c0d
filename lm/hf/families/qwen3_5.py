"""Qwen3.5, dense, text alone.  Qwen 2026, "Qwen3.5: towards native multimodal agents"."""

from collections.abc import Iterator

from lm.hf.families.llama import Llama
from lm.hf.families.qwen3_5_moe import Qwen35MoE
from lm.hf.io.family import Pair, without
from lm.schema import Tree


class Qwen35(Qwen35MoE):
    """The same with one feed-forward in each layer."""

    name = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    fields = {
        **without(Qwen35MoE.fields, "ffn.*"),
        "attention.n_kv_heads": ("num_key_value_heads", 4),
        "ffn.hidden": ("intermediate_size", 12288),
        "ffn.activation": ("hidden_act", "silu"),
    }
    further = tuple(key for key in Qwen35MoE.further if "experts" not in key)
    fixed = {
        **without(Qwen35MoE.fixed, "ffn.*"), "ffn.kind": "mlp", "ffn.gated": True,
    }  # fmt: skip

    def read(self, hf: Tree) -> Tree:
        return self.mixers(hf)

    def write(self, ours: Tree) -> Tree:
        return self.write_mixers(ours)

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from Llama.ffn(self, here, there, ours)


FAMILY = Qwen35()
