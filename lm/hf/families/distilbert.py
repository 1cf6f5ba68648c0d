"""DistilBERT with its head for masked tokens.  Sanh et al. 2019, arXiv:1910.01108."""

from collections.abc import Iterator

from lm.hf.families.bert import Bert
from lm.hf.io.family import Pair, module, same
from lm.schema import Tree


class DistilBert(Bert):
    """BERT under other names and without segments; one activation is within and before the head."""

    name = "distilbert"
    architecture = "DistilBertForMaskedLM"
    ignored = (r"distilbert\.embeddings\.position_ids",)
    older_endings = {}
    fields = {
        "vocab_size": ("vocab_size", 30522),
        "max_seq_len": ("max_position_embeddings", 512),
        "d_model": ("dim", 768),
        "n_layers": ("n_layers", 6),
        "attention.n_heads": ("n_heads", 12),
        "attention.dropout": ("attention_dropout", 0.1),
        "dropout": ("dropout", 0.1),
        "ffn.hidden": ("hidden_dim", 3072),
        "ffn.activation": ("activation", "gelu"),
    }
    further = ("tie_word_embeddings",)
    idle = ("sinusoidal_pos_embds", "tie_weights_")  # of how the weights were drawn, and of an older version
    fixed = {**Bert.fixed, "norm.eps": 1e-12}
    fixed_there = {}

    def read(self, hf: Tree) -> Tree:
        return super().read({**hf, "hidden_act": hf.get("activation", "gelu")}) | {"embed.segments": None}

    def write(self, ours: Tree) -> Tree:
        return {}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("embed.weight", "distilbert.embeddings.word_embeddings.weight")
        yield same("position.weight", "distilbert.embeddings.position_embeddings.weight")
        yield from module("embed_norm", "distilbert.embeddings.LayerNorm")
        yield from module("head", "vocab_projector")
        yield from module("head.dense", "vocab_transform")
        yield from module("head.norm", "vocab_layer_norm")
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}", f"distilbert.transformer.layer.{i}"
            for name, their_name in (("q", "q_lin"), ("k", "k_lin"), ("v", "v_lin"), ("o", "out_lin")):
                yield from module(f"{here}.attention.{name}", f"{there}.attention.{their_name}")
            yield from module(f"{here}.attention_residual.norm", f"{there}.sa_layer_norm")
            yield from module(f"{here}.ffn.up", f"{there}.ffn.lin1")
            yield from module(f"{here}.ffn.down", f"{there}.ffn.lin2")
            yield from module(f"{here}.ffn_residual.norm", f"{there}.output_layer_norm")


FAMILY = DistilBert()
