"""mT5.  Xue et al. 2020, arXiv:2010.11934."""

from collections.abc import Collection

from lm.hf.families.t5 import T5
from lm.hf.io.family import without
from lm.schema import Tree


class MT5(T5):
    """T5 1.1 in a hundred languages: states are not scaled, and the head has a matrix of its own wherever the file has one."""

    name = "mt5"
    architecture = "MT5ForConditionalGeneration"
    further = tuple(key for key in T5.further if key != "scale_decoder_outputs")
    fixed = {**T5.fixed, "head.scale": 1.0}

    def as_stored(self, hf: Tree, names: Collection[str]) -> Tree:
        """Ties the head as transformers 5 does, whatever the file says: it has the embedding's matrix where the file has none for it."""
        return {**hf, "tie_word_embeddings": "lm_head.weight" not in names}

    def read(self, hf: Tree) -> Tree:
        proj = hf.get("feed_forward_proj", "gated-gelu")
        return super().read({**hf, "feed_forward_proj": proj, "scale_decoder_outputs": False})

    def write(self, ours: Tree) -> Tree:
        return without(super().write(ours), "scale_decoder_outputs")


FAMILY = MT5()
