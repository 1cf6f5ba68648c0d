"""Granite 3.  IBM 2024, "Granite 3.0 Language Models"."""

from typing import ClassVar

from lm.hf.families.llama import Llama
from lm.schema import Tree


class Granite(Llama):
    """Llama with a factor on the embeddings, the scores, what each sublayer adds, and the logits (a divisor in the file)."""

    name = "granite"
    architecture = "GraniteForCausalLM"
    fields = {
        **Llama.fields,
        "embed.scale": ("embedding_multiplier", 1.0),
        "attention.scale": ("attention_multiplier", 1.0),
        "block.residual_scale": ("residual_multiplier", 1.0),
    }
    further: ClassVar[tuple[str, ...]] = ("logits_scaling",)

    def read(self, hf: Tree) -> Tree:
        return {"head.scale": 1 / (hf.get("logits_scaling") or 1.0)}

    def write(self, ours: Tree) -> Tree:
        return {"logits_scaling": 1 / ours["head.scale"]}


FAMILY = Granite()
