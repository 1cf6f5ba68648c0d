"""OLMo 2.  arXiv:2501.00656."""

from collections.abc import Iterator

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module, without


class OLMo2(Llama):
    """Llama with norms behind the sublayers, and on queries and keys over all heads together."""

    name = "olmo2"
    architecture = "Olmo2ForCausalLM"
    fields = {
        **without(Llama.fields, "ffn.bias"),
        "norm.eps": ("rms_norm_eps", 1e-5),
    }
    fixed = {**Llama.fixed, "norm.place": "output", "attention.qk_norm": "full"}

    def norms(self, here: str, there: str) -> Iterator[Pair]:
        yield from module(f"{here}.attention_residual.norm", f"{there}.post_attention_layernorm")
        yield from module(f"{here}.ffn_residual.norm", f"{there}.post_feedforward_layernorm")


FAMILY = OLMo2()
