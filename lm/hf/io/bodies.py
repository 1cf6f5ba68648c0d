"""Encoders without a head, `...Model` of transformers, as which embedding models are published (BGE, E5, GTE, Jina, MiniLM, Nomic)."""

import re
from collections.abc import Iterator
from functools import cache
from typing import ClassVar

from lm.hf.io.family import Family, Pair, families, same, without
from lm.nn.model_config import ModelConfig
from lm.schema import Tree

_HEADED = re.compile("ForMaskedLM$")
BODIES = (
    "albert", "bert", "camembert", "data2vec-text", "deberta-v2", "distilbert", "electra", "ernie", "jina_embeddings_v3", "megatron-bert",
    "modernbert", "nomic_bert", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
_NO_HEAD: Tree = {"head.tied": True, "head.bias": False}  # which has no weight, but for a matrix behind narrow embeddings
_NARROW = "head.narrow.weight"
OTHER_HEADS = ("ElectraForPreTraining",)
"""Classes whose head tells something else of tokens than which they are; their body is read."""
_UNDER_ANOTHER = {"electra": "electra."}
"""What the keys of such a body begin with."""


@cache
def bodies() -> dict[str, Family]:
    """Returns the families of `BODIES` without their head, by model_type."""
    return {name: _without_head(family) for name, family in families().items() if name in BODIES}


def headless(cfg: ModelConfig) -> bool:
    """Whether an encoder's head has no weight, so that it is a body alone."""
    head = cfg.head
    return cfg.kind == "encoder" and head.labels is None and head.tied and head.transform is None and not head.bias


def _without_head(family: Family) -> Family:
    body = type(family)
    own = {
        "body": body,
        "architecture": _HEADED.sub("Model", body.architecture),
        "auto": "AutoModel",
        "fields": without(body.fields, "head.*"),
        "idle": (*body.idle, *(key for ours, key, _ in family.places() if ours.startswith("head."))),
        "fixed": without(body.fixed, "head.*") | _NO_HEAD,
        "ignored": (*body.ignored, r"pooler\.(dense\.)?(weight|bias)", r"embeddings\.position_ids"),
        "beneath": _UNDER_ANOTHER.get(family.name, ""),
        "unwritten": (_NARROW,),
        "zero_if_missing": (_NARROW,),
    }
    return type(f"{body.__name__}Body", (_Body, body), own)(family.even_heads)


class _Body(Family):
    """What such a family does otherwise than the one whose body it is, which stands behind it in the order of classes."""

    body: ClassVar[type[Family]]

    def read(self, hf: Tree) -> Tree:
        return without(self.body.read(self, hf), "head.*")

    def write(self, ours: Tree) -> Tree:
        return self.body.write(self, ours | {"head.transform": "gelu"})  # of the head that a class with one would have

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        """Yields those of the body, under names without the first part, which is the body's in the model with a head."""
        pairs = [pair for pair in self.body.pairs(self, ours) if not pair.ours[0].startswith("head.")]
        root = next(pair.theirs[0] for pair in pairs if pair.ours == ("embed.weight",)).partition(".")[0]
        for pair in pairs:
            yield pair.renamed(lambda key: key.removeprefix(f"{root}."))
        yield same(_NARROW, _NARROW)
