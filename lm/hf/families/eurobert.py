"""EuroBERT.  Boizard et al. 2025, arXiv:2503.05500."""

from collections.abc import Iterator

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, same
from lm.schema import Tree


class EuroBert(Llama):
    """Llama that reads both ways; where its feed-forward has biases, its logits have one too."""

    name = "eurobert"
    architecture = "EuroBertForMaskedLM"
    auto = "AutoModelForMaskedLM"
    fields = {
        **Llama.fields,
        "norm.eps": ("rms_norm_eps", 1e-5),
        "head.bias": ("mlp_bias", False),
    }
    idle = ("classifier_pooling",)
    fixed = {**Llama.fixed, "kind": "encoder"}
    fixed_there = {"pad_token_id": None}  # where none is told, transformers takes 128001

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield from super().pairs(ours)
        yield same("head.bias", "lm_head.bias")


FAMILY = EuroBert(even_heads=True)
