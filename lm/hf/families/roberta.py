"""RoBERTa with its head for masked tokens.  Liu et al. 2019, arXiv:1907.11692."""

from collections.abc import Iterator
from typing import ClassVar

from lm.hf.families.bert import Bert
from lm.hf.io.family import Pair
from lm.hf.io.transforms import SkipRows
from lm.schema import Tree

_HEAD = {
    "cls.predictions.decoder.": "lm_head.decoder.", "cls.predictions.bias": "lm_head.bias",
    "cls.predictions.transform.dense.": "lm_head.dense.", "cls.predictions.transform.LayerNorm.": "lm_head.layer_norm.",
}  # fmt: skip


class Roberta(Bert):
    """BERT under other names; its table of positions starts with two rows for padding, and GELU is before the head whatever is within."""

    name = "roberta"
    architecture = "RobertaForMaskedLM"
    root: ClassVar[str] = "roberta."  # of the keys of a model without its head
    pad = 1
    ignored: ClassVar[tuple[str, ...]] = (
        r"roberta\.pooler\.dense\.(weight|bias)",
        r"roberta\.embeddings\.position_ids",
        r"lm_head\.decoder\.bias",
    )

    def read(self, hf: Tree) -> Tree:
        [rows] = [hf.get(key, missing) for ours, key, missing in self.places() if ours == "max_seq_len"]
        return super().read(hf) | {"max_seq_len": rows - self.pad - 1, "head.transform": "gelu"}

    def write(self, ours: Tree) -> Tree:
        return super().write(ours) | {"max_position_embeddings": ours["max_seq_len"] + self.pad + 1}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        for pair in super().pairs(ours):
            [key] = pair.theirs
            names = {"bert.": self.root, **_HEAD}
            old = next(old for old in names if key.startswith(old))
            transform = SkipRows(self.pad + 1) if pair.ours == ("position.weight",) else pair.transform
            yield Pair(pair.ours, (names[old] + key.removeprefix(old),), transform)


FAMILY = Roberta()
