"""mBART.  Liu et al. 2020, arXiv:2001.08210."""

from collections.abc import Iterator

from lm.hf.families.bart import Bart
from lm.hf.io.family import Pair, module
from lm.schema import Tree


class MBart(Bart):
    """BART with norms before the sublayers, and behind the last layer of each stack; the first token of the decoder names a language."""

    name = "mbart"
    architecture = "MBartForConditionalGeneration"
    fields = {**Bart.fields, "start_token": ("decoder_start_token_id", None)}
    fixed = {**Bart.fixed, "norm.place": "pre"}
    fixed_there = {**Bart.fixed_there, "normalize_before": True, "add_final_layer_norm": True, "add_bias_logits": False}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield from super().pairs(ours)
        yield from module("encoder.norm", "model.encoder.layer_norm")
        yield from module("norm", "model.decoder.layer_norm")


FAMILY = MBart()
