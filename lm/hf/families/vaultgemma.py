"""VaultGemma.  Google 2025, arXiv:2510.15001."""

from collections.abc import Iterator

from lm.hf.families.gemma2 import Gemma2
from lm.hf.io.family import Pair, module


class VaultGemma(Gemma2):
    """Gemma 2 with norms before the sublayers alone."""

    name = "vaultgemma"
    architecture = "VaultGemmaForCausalLM"
    fixed = {**Gemma2.fixed, "norm.place": "pre"}
    fixed_there = {}

    def norms(self, here: str, there: str) -> Iterator[Pair]:
        yield from module(f"{here}.attention_residual.norm", f"{there}.input_layernorm")
        yield from module(f"{here}.ffn_residual.norm", f"{there}.pre_feedforward_layernorm")


FAMILY = VaultGemma(even_heads=True)
