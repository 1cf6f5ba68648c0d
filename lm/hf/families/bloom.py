"""BLOOM.  BigScience 2022, arXiv:2211.05100."""

from collections.abc import Iterator

from lm.hf.io.family import Family, Pair, module, modules, same
from lm.hf.io.transforms import SplitHeads
from lm.schema import Tree


class Bloom(Family):
    """ALiBi, a norm behind the embedding, and q, k and v stored as one, by head."""

    name = "bloom"
    architecture = "BloomForCausalLM"
    prefix = "transformer."
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": ("seq_length", 2048),
        "d_model": "hidden_size",
        "n_layers": "n_layer",
        "norm.eps": ("layer_norm_epsilon", 1e-5),
        "attention.n_heads": "n_head",
        "attention.dropout": ("attention_dropout", 0.0),
        "dropout": ("hidden_dropout", 0.0),
        "head.tied": ("tie_word_embeddings", True),
    }
    fixed = {
        "kind": "decoder", "norm.kind": "layer", "norm.place": "pre", "position.kind": "alibi", "attention.kind": "gqa",
        "attention.qkv_bias": True, "attention.out_bias": True, "ffn.kind": "mlp", "ffn.gated": False, "ffn.bias": True,
        "ffn.activation": "gelu_tanh", "block.kind": "sequential", "embed.norm": True,
    }  # fmt: skip
    fixed_there = {"apply_residual_connection_post_layernorm": False}
    renamed = {"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("embed.weight", "transformer.word_embeddings.weight")
        yield from module("embed_norm", "transformer.word_embeddings_layernorm")
        yield same("head.weight", "lm_head.weight")
        yield from module("norm", "transformer.ln_f")
        heads = SplitHeads(ours["attention.n_heads"], [ours["attention.head_dim"]] * 3)
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}", f"transformer.h.{i}"
            yield from module(f"{here}.attention_residual.norm", f"{there}.input_layernorm")
            yield from module(f"{here}.ffn_residual.norm", f"{there}.post_attention_layernorm")
            yield from modules(tuple(f"{here}.attention.{name}" for name in "qkv"), f"{there}.self_attention.query_key_value", heads)
            yield from module(f"{here}.attention.o", f"{there}.self_attention.dense")
            yield from module(f"{here}.ffn.up", f"{there}.mlp.dense_h_to_4h")
            yield from module(f"{here}.ffn.down", f"{there}.mlp.dense_4h_to_h")


FAMILY = Bloom()
