"""EuroBERT.  Boizard et al. 2025, arXiv:2503.05500."""

from collections.abc import Iterator
from typing import Any, ClassVar

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, same
from lm.schema import Tree


class EuroBert(Llama):
    """Llama that reads both ways; where its feed-forward has biases, its logits have one too."""

    name = "eurobert"
    architecture = "EuroBertForMaskedLM"
    auto = "AutoModelForMaskedLM"
    fields: ClassVar[dict[str, str | tuple[str, Any]]] = {
        **Llama.fields,
        "norm.eps": ("rms_norm_eps", 1e-5),
        "head.bias": ("mlp_bias", False),
    }
    idle: ClassVar[tuple[str, ...]] = ("classifier_pooling",)
    fixed: ClassVar[Tree] = {**Llama.fixed, "kind": "encoder"}
    fixed_there: ClassVar[Tree] = {"pad_token_id": None}  # where none is told, transformers takes 128001

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield from super().pairs(ours)
        yield same("head.bias", "lm_head.bias")


FAMILY = EuroBert(even_heads=True)
