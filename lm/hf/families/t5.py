"""T5 1.0 and 1.1.  Raffel et al. 2019, arXiv:1910.10683; Shazeer 2020, arXiv:2002.05202."""

from collections.abc import Collection, Iterator
from typing import ClassVar

from lm.errors import ConfigError
from lm.hf.io.family import Family, Pair, activation, hf_activation, module, same
from lm.schema import Tree


class T5(Family):
    """Scores without 1/sqrt(head_dim), one table of relative positions for each stack, and in 1.0 a tied head over scaled states."""

    name = "t5"
    architecture = "T5ForConditionalGeneration"
    auto = "AutoModelForSeq2SeqLM"
    ignored: ClassVar[tuple[str, ...]] = (
        r"(encoder|decoder)\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    )
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": ("n_positions", 512),
        "d_model": "d_model",
        "n_encoder_layers": "num_layers",
        "norm.eps": ("layer_norm_epsilon", 1e-6),
        "attention.n_heads": "num_heads",
        "attention.head_dim": "d_kv",
        "attention.dropout": ("dropout_rate", 0.1),
        "dropout": ("dropout_rate", 0.1),
        "position.n_buckets": ("relative_attention_num_buckets", 32),
        "position.max_distance": ("relative_attention_max_distance", 128),
        "start_token": ("decoder_start_token_id", 0),
    }
    further: ClassVar[tuple[str, ...]] = (
        "d_ff", "feed_forward_proj", "dense_act_fn", "is_gated_act", "num_decoder_layers", "tie_word_embeddings", "scale_decoder_outputs",
    )  # fmt: skip
    respelled = ("feed_forward_proj",)  # dense_act_fn comes first
    fixed = {
        "kind": "encoder_decoder", "norm.kind": "rms", "norm.place": "pre", "attention.kind": "gqa", "attention.scale": 1.0,
        "position.kind": "t5_relative", "position.shared": True, "ffn.kind": "mlp", "block.kind": "sequential",
    }  # fmt: skip

    def as_stored(self, hf: Tree, names: Collection[str]) -> Tree:
        """Unties the head where the file has one: transformers 5 calls every head tied, but that of 1.1, which does not scale its states,
        may have a matrix of its own. Of an untied head without a matrix it takes the embedding's, and the states as they are."""
        own = "lm_head.weight" in names
        if not own and hf.get("tie_word_embeddings") is False:
            return {"scale_decoder_outputs": False, **hf, "tie_word_embeddings": True}
        return {**hf, "tie_word_embeddings": False} if own and hf.get("scale_decoder_outputs") is False else hf

    def read(self, hf: Tree) -> Tree:
        tied = hf.get("tie_word_embeddings", True)
        scaled = hf.get("scale_decoder_outputs", tied)
        layers = hf.get("num_decoder_layers") or hf["num_layers"]
        return {"n_layers": layers, "head.tied": tied, "head.scale": hf["d_model"] ** -0.5 if scaled else 1.0, **self.read_ffn(hf)}

    def read_ffn(self, hf: Tree) -> Tree:
        """The feed-forward of every layer. In transformers dense_act_fn follows from feed_forward_proj, but a file may say another."""
        gated, _, name = str(hf.get("feed_forward_proj", "relu")).rpartition("-")
        told = {"feed_forward_proj": "gelu_new" if gated and name == "gelu" else name, "dense_act_fn": hf.get("dense_act_fn")}
        act = activation(told, "feed_forward_proj" if told["dense_act_fn"] is None else "dense_act_fn", "relu")
        if gated not in ("", "gated"):
            raise ConfigError(f"config.json: feed_forward_proj={hf['feed_forward_proj']!r} is not known. Known are relu and gated-gelu.")
        return {"ffn.hidden": hf["d_ff"], "ffn.gated": bool(gated), "ffn.activation": act}

    def write(self, ours: Tree) -> Tree:
        scaled = ours["head.scale"] != 1.0
        there: Tree = {"num_decoder_layers": ours["n_layers"], "tie_word_embeddings": ours["head.tied"], "scale_decoder_outputs": scaled}
        return {**there, "is_encoder_decoder": True, **self.write_ffn(ours)}

    def write_ffn(self, ours: Tree) -> Tree:
        """The feed-forward of every layer."""
        name = whole = hf_activation(ours.get("ffn.activation"))
        if ours.get("ffn.gated"):
            whole = f"gated-{'gelu' if name == 'gelu_pytorch_tanh' else name}"
        return {"d_ff": ours.get("ffn.hidden"), "feed_forward_proj": whole, "dense_act_fn": name}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield self.embedding(ours)
        yield same("head.weight", "lm_head.weight")
        for here, there, layers in (("encoder.", "encoder", ours["n_encoder_layers"]), ("", "decoder", ours["n_layers"])):
            yield self.tables(f"{here}position.table.weight", there, ours["position.n_buckets"], layers)
            yield from module(f"{here}norm", f"{there}.final_layer_norm")
            for i in range(layers):
                yield from self.block(f"{here}blocks.{i}", f"{there}.block.{i}.layer", ours, cross=there == "decoder")

    def embedding(self, ours: Tree) -> Pair:
        """Returns the pair of the embedding, which both stacks share."""
        return same("embed.weight", "shared.weight")

    def tables(self, here: str, there: str, n_buckets: int, layers: int) -> Pair:
        """Returns the pair of a stack's relative positions."""
        return same(here, f"{there}.block.0.layer.0.SelfAttention.relative_attention_bias.weight")

    def block(self, here: str, there: str, ours: Tree, cross: bool) -> Iterator[Pair]:
        """Yields the pairs of one layer."""
        sublayers = [("attention", "SelfAttention"), ("cross", "EncDecAttention")] if cross else [("attention", "SelfAttention")]
        for n, (name, their_name) in enumerate(sublayers):
            yield from module(f"{here}.{name}_residual.norm", f"{there}.{n}.layer_norm")
            for part in "qkvo":
                yield from module(f"{here}.{name}.{part}", f"{there}.{n}.{their_name}.{part}")
        last = len(sublayers)
        yield from module(f"{here}.ffn_residual.norm", f"{there}.{last}.layer_norm")
        yield from self.ffn(f"{here}.ffn", f"{there}.{last}", ours)

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of the feed-forward, whose first matrix is called wi_1 beside a gate, and wi without."""
        gated = ours.get("ffn.gated")
        yield from module(f"{here}.up", f"{there}.DenseReluDense.wi_1" if gated else f"{there}.DenseReluDense.wi")
        yield from module(f"{here}.gate", f"{there}.DenseReluDense.wi_0")
        yield from module(f"{here}.down", f"{there}.DenseReluDense.wo")


FAMILY = T5()
