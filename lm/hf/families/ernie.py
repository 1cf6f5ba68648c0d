"""ERNIE 1.0, and those of its successors without embeddings of tasks.  Sun et al. 2019, arXiv:1904.09223."""

from collections.abc import Iterator

from lm.hf.families.bert import Bert
from lm.hf.io.family import Pair
from lm.schema import Tree


class Ernie(Bert):
    """BERT under another name."""

    name = "ernie"
    architecture = "ErnieForMaskedLM"
    ignored = tuple(pattern.replace(r"bert\.", r"ernie\.") for pattern in Bert.ignored)
    idle = ("task_type_vocab_size",)
    fixed_there = {**Bert.fixed_there, "use_task_id": False}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        for pair in super().pairs(ours):
            yield pair.renamed(lambda key: key.replace("bert", "ernie", 1) if key.startswith("bert.") else key)


FAMILY = Ernie()
