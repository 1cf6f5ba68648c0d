"""OLMo 2.  arXiv:2501.00656."""

from collections.abc import Iterator
from typing import Any, ClassVar

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module
from lm.schema import Tree


class OLMo2(Llama):
    """Llama with norms behind the sublayers, and on queries and keys over all heads together."""

    name = "olmo2"
    architecture = "Olmo2ForCausalLM"
    fields: ClassVar[dict[str, str | tuple[str, Any]]] = {
        **{ours: theirs for ours, theirs in Llama.fields.items() if ours != "ffn.bias"},
        "norm.eps": ("rms_norm_eps", 1e-5),
    }
    fixed: ClassVar[Tree] = {**Llama.fixed, "norm.place": "output", "attention.qk_norm": "full"}

    def norms(self, here: str, there: str) -> Iterator[Pair]:
        yield from module(f"{here}.attention_residual.norm", f"{there}.post_attention_layernorm")
        yield from module(f"{here}.ffn_residual.norm", f"{there}.post_feedforward_layernorm")


FAMILY = OLMo2()
