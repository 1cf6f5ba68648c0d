"""RoFormer, the first with rotary positions.  Su et al. 2021, arXiv:2104.09864."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from lm.hf.families.bert import Bert
from lm.hf.io.family import Pair
from lm.nn.position.absolute import Sinusoidal, SinusoidalConfig
from lm.schema import Tree


class RoFormer(Bert):
    """BERT with rotary positions, neighbours rotated, instead of learned ones."""

    name = "roformer"
    architecture = "RoFormerForMaskedLM"
    ignored = tuple(pattern.replace("bert", "roformer") for pattern in Bert.ignored)
    fields = {**Bert.fields, "max_seq_len": ("max_position_embeddings", 1536)}
    further: ClassVar[tuple[str, ...]] = (*Bert.further, "embedding_size")
    fixed = {**Bert.fixed, "position.kind": "rope", "position.interleaved": True}
    fixed_there: ClassVar[Tree] = {"rotary_value": False, "add_cross_attention": False}

    def write(self, ours: Tree) -> Tree:
        return super().write(ours) | {"embedding_size": ours["d_model"]}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        for pair in super().pairs(ours):
            yield pair.renamed(lambda key: key.replace("bert", "roformer", 1) if key.startswith("bert.") else key)

    def constants(self, ours: Tree) -> Mapping[str, Tensor]:
        """Returns the sines and cosines of all positions, which transformers stores beside the weights."""
        waves = Sinusoidal(SinusoidalConfig(halves=True)).waves(torch.arange(ours["max_seq_len"]), ours["attention.head_dim"])
        return {"roformer.encoder.embed_positions.weight": waves}


FAMILY = RoFormer()
