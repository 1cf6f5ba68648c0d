"""ALBERT with its head for masked tokens.  Lan et al. 2020, arXiv:1909.11942."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.bert import Bert
from lm.hf.io.family import Pair, module, same, without
from lm.schema import Tree


class Albert(Bert):
    """BERT with a narrow embedding, and with one layer, or a few, which all passes share."""

    name = "albert"
    architecture = "AlbertForMaskedLM"
    ignored = (r"albert\.pooler\.(weight|bias)", r"albert\.embeddings\.position_ids", r"predictions\.decoder\.bias",
               r"sop_classifier\.classifier\.(weight|bias)")  # fmt: skip
    older_endings = {}
    fields = {
        **without(Bert.fields, "n_layers"),
        "vocab_size": ("vocab_size", 30000),
        "embed.factorized.width": ("embedding_size", 128),
        "n_layers": ("inner_group_num", 1),
        "residual.times": ("num_hidden_layers", 12),
        "attention.dropout": ("attention_probs_dropout_prob", 0.0),
        "dropout": ("hidden_dropout_prob", 0.0),
        "ffn.activation": ("hidden_act", "gelu_new"),
    }
    idle = ("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks", "classifier_dropout_prob")  # of another program
    fixed = {**Bert.fixed, "residual.kind": "loop", "embed.factorized.bias": True, "embed.factorized.widened": "sum"}
    fixed_there = {"num_hidden_groups": 1}

    def read(self, hf: Tree) -> Tree:
        if (n := hf.get("num_hidden_groups", 1)) != 1:
            raise ConfigError(f"config.json: num_hidden_groups={n}, and in lm all passes share their layers. Import another model.")
        return super().read({"hidden_act": "gelu_new", **hf})

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        for name, theirs in (("embed", "word"), ("position", "position"), ("segment", "token_type")):
            yield same(f"{name}.weight", f"albert.embeddings.{theirs}_embeddings.weight")
        yield from module("embed_norm", "albert.embeddings.LayerNorm")
        yield from module("widen", "albert.encoder.embedding_hidden_mapping_in")
        yield same("head.weight", "predictions.decoder.weight")
        yield same("head.bias", "predictions.bias")
        yield from module("head.dense", "predictions.dense")
        yield from module("head.norm", "predictions.LayerNorm")
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}", f"albert.encoder.albert_layer_groups.0.albert_layers.{i}"
            for name, their_name in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "dense")):
                yield from module(f"{here}.attention.{name}", f"{there}.attention.{their_name}")
            yield from module(f"{here}.attention_residual.norm", f"{there}.attention.LayerNorm")
            yield from module(f"{here}.ffn.up", f"{there}.ffn")
            yield from module(f"{here}.ffn.down", f"{there}.ffn_output")
            yield from module(f"{here}.ffn_residual.norm", f"{there}.full_layer_layer_norm")


FAMILY = Albert()
