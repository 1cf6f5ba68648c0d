"""HyperCLOVA X SEED.  NAVER Cloud 2025, arXiv:2506.22403."""

from collections.abc import Iterator

from lm.hf.families.granite import Granite
from lm.hf.io.family import Pair, module, without
from lm.schema import Tree


class HyperCLOVAX(Granite):
    """Granite whose factor on the logits is one in the file too, with or without a second norm behind each sublayer."""

    name = "hyperclovax"
    architecture = "HyperCLOVAXForCausalLM"
    fields = {
        **Granite.fields,
        "attention.scale": ("attention_multiplier", None),
        "head.scale": ("logits_scaling", 1.0),
    }
    further = ("use_post_norm",)
    fixed = without(Granite.fixed, "norm.place")

    def read(self, hf: Tree) -> Tree:
        return {"norm.place": "sandwich" if hf.get("use_post_norm", True) else "pre"}

    def write(self, ours: Tree) -> Tree:
        return {"use_post_norm": ours["norm.place"] == "sandwich"}

    def norms(self, here: str, there: str) -> Iterator[Pair]:
        yield from super().norms(here, there)
        yield from module(f"{here}.attention_residual.norm_out", f"{there}.post_norm1")
        yield from module(f"{here}.ffn_residual.norm_out", f"{there}.post_norm2")


FAMILY = HyperCLOVAX(even_heads=True)
