"""BERT with its head for masked tokens.  Devlin et al. 2018, arXiv:1810.04805."""

from collections.abc import Iterator
from typing import ClassVar

from lm.errors import ConfigError
from lm.hf.io.family import Family, Pair, activation, module, same
from lm.schema import Tree


class Bert(Family):
    """Norms after the sublayers and the embedding, and a dense layer with one more norm before the tied head."""

    name = "bert"
    architecture = "BertForMaskedLM"
    auto = "AutoModelForMaskedLM"
    ignored: ClassVar[tuple[str, ...]] = (
        r"bert\.pooler\.dense\.(weight|bias)", r"cls\.seq_relationship\.(weight|bias)", r"bert\.embeddings\.position_ids",
        r"cls\.predictions\.decoder\.bias",
    )  # fmt: skip
    older_endings = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": ("max_position_embeddings", 512),
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "norm.eps": ("layer_norm_eps", 1e-12),
        "attention.n_heads": "num_attention_heads",
        "attention.dropout": ("attention_probs_dropout_prob", 0.1),
        "dropout": ("hidden_dropout_prob", 0.1),
        "ffn.hidden": "intermediate_size",
        "ffn.activation": ("hidden_act", "gelu"),
    }
    further: ClassVar[tuple[str, ...]] = ("type_vocab_size", "tie_word_embeddings", "is_decoder")
    fixed = {
        "kind": "encoder", "norm.kind": "layer", "norm.place": "post", "position.kind": "learned", "attention.kind": "gqa",
        "attention.qkv_bias": True, "attention.out_bias": True, "ffn.kind": "mlp", "ffn.gated": False, "ffn.bias": True,
        "block.kind": "sequential", "embed.norm": True, "head.tied": True, "head.bias": True,
    }  # fmt: skip
    fixed_there = {"position_embedding_type": "absolute", "add_cross_attention": False}

    def read(self, hf: Tree) -> Tree:
        for key, needed in (("tie_word_embeddings", True), ("is_decoder", False)):
            if hf.get(key, needed) != needed:
                raise ConfigError(
                    f"config.json: {key}={hf[key]} has no place in lm's {self.name}, which has {needed}. Import another model."
                )
        return {"embed.segments": hf.get("type_vocab_size") or 2, "head.transform": activation(hf, "hidden_act", "gelu")}

    def write(self, ours: Tree) -> Tree:
        return {"type_vocab_size": ours["embed.segments"]}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("embed.weight", "bert.embeddings.word_embeddings.weight")
        yield same("position.weight", "bert.embeddings.position_embeddings.weight")
        yield same("segment.weight", "bert.embeddings.token_type_embeddings.weight")
        yield from module("embed_norm", "bert.embeddings.LayerNorm")
        yield same("head.weight", "cls.predictions.decoder.weight")
        yield same("head.bias", "cls.predictions.bias")
        yield from module("head.dense", "cls.predictions.transform.dense")
        yield from module("head.norm", "cls.predictions.transform.LayerNorm")
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}", f"bert.encoder.layer.{i}"
            for name, their_name in (("q", "self.query"), ("k", "self.key"), ("v", "self.value"), ("o", "output.dense")):
                yield from module(f"{here}.attention.{name}", f"{there}.attention.{their_name}")
            yield from module(f"{here}.attention_residual.norm", f"{there}.attention.output.LayerNorm")
            yield from module(f"{here}.ffn.up", f"{there}.intermediate.dense")
            yield from module(f"{here}.ffn.down", f"{there}.output.dense")
            yield from module(f"{here}.ffn_residual.norm", f"{there}.output.LayerNorm")


FAMILY = Bert()
