"""UMT5, and Pile-T5.  Chung et al. 2023, arXiv:2304.09151."""

from collections.abc import Collection

from lm.hf.families.mt5 import MT5
from lm.hf.io.family import Pair, without
from lm.hf.io.transforms import Join
from lm.nn.model_config import ModelConfig
from lm.schema import Tree


class UMT5(MT5):
    """T5 1.1 with a table of relative positions for each layer. States are scaled where the head is tied.

    An untied head, as all published models have, is read as it was trained. transformers 5.0 to 5.23 scales its states too, and so computes
    other probabilities, for which an export is refused. From 5.24 on it writes down whether they are scaled.
    """

    name = "umt5"
    architecture = "UMT5ForConditionalGeneration"
    further = (*MT5.further, "scale_decoder_outputs")
    ignored = (r"(encoder|decoder)\.embed_tokens\.weight",)
    fixed = {**without(MT5.fixed, "head.scale"), "position.shared": False}

    def as_stored(self, hf: Tree, names: Collection[str]) -> Tree:
        """Of a head that has no matrix of its own, the file still says by "untied" that its states are not scaled."""
        found = super().as_stored(hf, names)
        unscaled = found["tie_word_embeddings"] and hf.get("tie_word_embeddings") is False
        return {"scale_decoder_outputs": False, **found} if unscaled else found

    def read(self, hf: Tree) -> Tree:
        scaled = hf.get("scale_decoder_outputs", hf.get("tie_word_embeddings", True))
        return {**super().read(hf), "head.scale": hf["d_model"] ** -0.5 if scaled else 1.0}

    def homeless(self, cfg: ModelConfig) -> list[str]:
        found = super().homeless(cfg)
        if cfg.head.tied:
            return found
        return [*found, "model.head.tied=false must be true, since transformers 5.0 to 5.23 scales the states before any head of UMT5"]

    def tables(self, here: str, there: str, n_buckets: int, layers: int) -> Pair:
        names = (f"{there}.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight" for i in range(layers))
        return Pair((here,), tuple(names), Join([n_buckets] * layers))


FAMILY = UMT5()
