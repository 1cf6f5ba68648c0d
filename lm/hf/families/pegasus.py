"""PEGASUS.  Zhang et al. 2019, arXiv:1912.08777."""

from collections.abc import Mapping

from torch import Tensor

from lm.hf.families.marian import Marian, tables
from lm.hf.families.mbart import MBart
from lm.schema import Tree


class Pegasus(MBart):
    """mBART with sines and cosines for positions, and no norm behind the embedding."""

    name = "pegasus"
    architecture = "PegasusForConditionalGeneration"
    fields = {**MBart.fields, "start_token": ("decoder_start_token_id", 0)}
    fixed = {**Marian.fixed, "norm.place": "pre"}
    fixed_there = {**MBart.fixed_there, "normalize_embedding": False, "static_position_embeddings": True}

    def constants(self, ours: Tree) -> Mapping[str, Tensor]:
        return tables(ours)


FAMILY = Pegasus()
