"""Megatron-BERT, and GatorTron.  Shoeybi et al. 2019, arXiv:1909.08053."""

from collections.abc import Iterator

from lm.hf.families.bert import Bert
from lm.hf.io.family import Pair, module
from lm.schema import Tree


class MegatronBert(Bert):
    """BERT with norms before the sublayers and behind the last, and none behind the embedding."""

    name = "megatron-bert"
    architecture = "MegatronBertForMaskedLM"
    fixed = {**Bert.fixed, "norm.place": "pre", "embed.norm": False}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        for pair in super().pairs(ours):
            yield pair.renamed(lambda key: key.replace("attention.output.LayerNorm", "attention.ln").replace("output.LayerNorm", "ln"))
        yield from module("norm", "bert.encoder.ln")


FAMILY = MegatronBert()
