"""ModernBERT's decoder, Ettin.  Weller et al. 2025, arXiv:2507.11412."""

from collections.abc import Iterator

from lm.hf.families.modernbert import ModernBert
from lm.hf.io.family import Pair, module
from lm.schema import Tree


class ModernBertDecoder(ModernBert):
    """ModernBERT that sees the tokens before, and half as many of them through its windows."""

    name = "modernbert-decoder"
    architecture = "ModernBertDecoderForCausalLM"
    auto = "AutoModelForCausalLM"
    transform = "lm_head"
    itself = 0
    fixed = {**ModernBert.fixed, "kind": "decoder"}
    fixed_there = {"pad_token_id": 0}  # where none is told, transformers takes 50283

    def write(self, ours: Tree) -> Tree:
        there = super().write(ours)  # transformers takes sliding_window, where a file has it, before the half of local_attention
        return {**there, **({"sliding_window": there["local_attention"] // 2} if "local_attention" in there else {})}

    def projections(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for name in "qkv":
            yield from module(f"{here}.attention.{name}", f"{there}.attn.{name}_proj")


FAMILY = ModernBertDecoder()
