"""Youtu-LLM.  Tencent 2025, arXiv:2512.24618."""

from collections.abc import Iterator
from typing import ClassVar

from lm.hf.families.deepseek_v3 import DeepSeekV3
from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, without
from lm.schema import Tree


class Youtu(DeepSeekV3):
    """DeepSeek-V3's latent attention beside a dense feed-forward, and no further tokens."""

    name = "youtu"
    architecture = "YoutuForCausalLM"
    rare = True
    fields = {
        **without(DeepSeekV3.fields, "ffn.*"),
        "ffn.hidden": ("intermediate_size", 6144),
        "ffn.activation": ("hidden_act", "silu"),
        "head.tied": ("tie_word_embeddings", True),
    }
    further: ClassVar[tuple[str, ...]] = ("num_key_value_heads", "qk_head_dim", "head_dim")
    renamed = {}
    idle = ("embedding_initializer_range",)
    fixed = {
        **without(DeepSeekV3.fixed, "ffn.*"), "ffn.kind": "mlp", "ffn.gated": True,
        "mtp": None,
    }  # fmt: skip
    fixed_there = {}

    def read(self, hf: Tree) -> Tree:
        return self._scale(hf)

    def write(self, ours: Tree) -> Tree:
        return self.widths(ours)

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from Llama.ffn(self, here, there, ours)


FAMILY = Youtu()
