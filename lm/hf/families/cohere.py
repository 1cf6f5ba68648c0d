"""Command R.  Cohere 2024, "Command R: retrieval-augmented generation at production scale"."""

from collections.abc import Iterator

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module, without


class Cohere(Llama):
    """Both sublayers side by side behind one layer norm without bias, neighbours rotated, and a factor on the logits."""

    name = "cohere"
    architecture = "CohereForCausalLM"
    theta = 500000.0
    fields = {
        **without(Llama.fields, "ffn.bias"),
        "norm.eps": ("layer_norm_eps", 1e-5),
        "head.scale": ("logit_scale", 0.0625),
        "head.tied": ("tie_word_embeddings", True),
    }
    fixed = {
        **Llama.fixed, "norm.kind": "layer", "norm.bias": False, "block.kind": "parallel", "block.shared_norm": True,
        "position.interleaved": True,
    }  # fmt: skip
    fixed_there = {"use_qk_norm": False}

    def norms(self, here: str, there: str) -> Iterator[Pair]:
        yield from module(f"{here}.attention_norm", f"{there}.input_layernorm")


FAMILY = Cohere()
