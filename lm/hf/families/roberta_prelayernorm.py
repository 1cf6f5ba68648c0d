"""RoBERTa with norms before the sublayers.  Wettig et al. 2022, arXiv:2202.08005."""

from collections.abc import Iterator
from typing import ClassVar

from lm.hf.families.roberta import Roberta
from lm.hf.io.family import Pair, module
from lm.schema import Tree


class RobertaPreNorm(Roberta):
    """RoBERTa with norms before the sublayers, and one more behind the last."""

    name = "roberta-prelayernorm"
    architecture = "RobertaPreLayerNormForMaskedLM"
    root = "roberta_prelayernorm."
    ignored = tuple(pattern.replace("roberta", "roberta_prelayernorm") for pattern in Roberta.ignored)
    fixed = {**Roberta.fixed, "norm.place": "pre"}
    norms: ClassVar[tuple[str, str, str]] = ("attention.LayerNorm", "intermediate.LayerNorm", "LayerNorm")  # within a layer, and the last

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        attention, ffn, last = self.norms
        for pair in super().pairs(ours):
            yield pair.renamed(lambda key: key.replace("attention.output.LayerNorm", attention).replace("output.LayerNorm", ffn))
        yield from module("norm", self.root + last)


FAMILY = RobertaPreNorm()
