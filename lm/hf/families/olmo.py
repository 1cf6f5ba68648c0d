"""OLMo 1.  Groeneveld et al. 2024, arXiv:2402.00838."""

from collections.abc import Iterator

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, without


class OLMo(Llama):
    """Llama with layer norms that have neither weight nor bias."""

    name = "olmo"
    architecture = "OlmoForCausalLM"
    fields = without(Llama.fields, "norm.eps", "ffn.bias")
    fixed = {**Llama.fixed, "norm.kind": "layer", "norm.weight": False, "norm.bias": False, "norm.eps": 1e-5}
    fixed_there = {"clip_qkv": None}

    def norms(self, here: str, there: str) -> Iterator[Pair]:
        yield from ()


FAMILY = OLMo()
