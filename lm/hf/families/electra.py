"""ELECTRA's generator, with its head for masked tokens.  Clark et al. 2020, arXiv:2003.10555."""

from collections.abc import Iterator
from functools import reduce

from lm.hf.families.bert import Bert
from lm.hf.io.family import Pair, module
from lm.schema import Tree

_NAMES = {"cls.predictions.bias": "generator_lm_head.bias", "cls.predictions.decoder": "generator_lm_head",
         "cls.predictions.transform": "generator_predictions", "bert.": "electra."}  # fmt: skip
"""Parts of BERT's names, and of these ones."""


class Electra(Bert):
    """BERT under other names, whose embedding may be narrow; the activation before the head is gelu."""

    name = "electra"
    architecture = "ElectraForMaskedLM"
    ignored = (r"electra\.embeddings\.position_ids", r"generator_predictions\.dense_prediction\.(weight|bias)",
               r"discriminator_predictions\..*")  # fmt: skip
    older_endings = {}
    fields = {**Bert.fields, "vocab_size": ("vocab_size", 30522)}
    further = (*Bert.further, "embedding_size")
    idle = ("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")  # of a class for several choices

    def read(self, hf: Tree) -> Tree:
        narrow = {"width": hf.get("embedding_size", 128), "bias": True, "widened": "sum"}
        own = {"embed.factorized": None if narrow["width"] == hf["hidden_size"] else narrow}
        return {**super().read(hf), **own, "head.transform": "gelu"}

    def write(self, ours: Tree) -> Tree:
        return {**super().write(ours), "embedding_size": ours.get("embed.factorized.width", ours["d_model"])}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield from module("widen", "electra.embeddings_project")
        for pair in super().pairs(ours):
            yield pair.renamed(_renamed)


def _renamed(path: str) -> str:
    return reduce(lambda name, parts: name.replace(*parts), _NAMES.items(), path)


FAMILY = Electra()
