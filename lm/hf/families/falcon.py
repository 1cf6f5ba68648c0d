"""Falcon 7B, 40B, 180B and 2-11B.  Almazrouei et al. 2023, arXiv:2311.16867."""

from collections.abc import Iterator

from lm.hf.io.family import Family, Pair, module, modules, same
from lm.hf.io.transforms import SplitHeads
from lm.schema import Tree

_ALIKE = {
    "ffn_norm": "ln_mlp", "attention_residual.norm": "input_layernorm", "ffn_residual.norm": "post_attention_layernorm",
    "attention.o": "self_attention.dense", "ffn.up": "mlp.dense_h_to_4h", "ffn.down": "mlp.dense_4h_to_h",
}  # fmt: skip


class Falcon(Family):
    """Both sublayers side by side behind one norm or two; queries, their key and their value are stored as one, by group."""

    name = "falcon"
    architecture = "FalconForCausalLM"
    prefix = "transformer."
    theta = 10000.0
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": ("max_position_embeddings", 2048),
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "norm.eps": ("layer_norm_epsilon", 1e-5),
        "attention.n_heads": "num_attention_heads",
        **dict.fromkeys(("attention.qkv_bias", "attention.out_bias", "ffn.bias"), ("bias", False)),
        "attention.dropout": ("attention_dropout", 0.0),
        "dropout": ("hidden_dropout", 0.0),
        "ffn.hidden": ("ffn_hidden_size", None),
        "ffn.activation": ("activation", "gelu"),
        "head.tied": ("tie_word_embeddings", True),
    }
    respelled = (  # the one form has no use for the other's keys
        "new_decoder_architecture", "num_ln_in_parallel_attn", "parallel_attn", "multi_query", "num_kv_heads",
    )  # fmt: skip
    further = respelled
    renamed = {"n_embed": "hidden_size"}
    fixed = {
        "kind": "decoder", "norm.kind": "layer", "norm.place": "pre", "position.kind": "rope", "attention.kind": "gqa", "ffn.kind": "mlp",
        "ffn.gated": False,
    }  # fmt: skip
    fixed_there = {"alibi": False}  # transformers rounds its product with the place to bfloat16: no two lengths agree

    def read(self, hf: Tree) -> Tree:
        """Returns further options. In the newer form (40B and later) blocks are always parallel, and keys of the older form have no
        effect."""
        heads, new = hf["num_attention_heads"], bool(hf.get("new_decoder_architecture"))
        older = 1 if hf.get("multi_query", True) else heads
        groups = hf.get("num_kv_heads") or heads if new else older
        two = new and hf.get("num_ln_in_parallel_attn") != 1
        parallel: Tree = {"block.kind": "parallel", "block.shared_norm": not two}
        sequential = not new and not hf.get("parallel_attn", True)
        return {"attention.n_kv_heads": groups, **({"block.kind": "sequential"} if sequential else parallel)}

    def write(self, ours: Tree) -> Tree:
        groups, parallel, shared = ours["attention.n_kv_heads"], ours["block.kind"] == "parallel", ours.get("block.shared_norm", True)
        new = parallel and (not shared or 1 < groups < ours["attention.n_heads"])
        two = (1 if shared else 2) if new else None
        heads: Tree = {"multi_query": groups == 1, "num_kv_heads": groups}
        return {"new_decoder_architecture": new, "num_ln_in_parallel_attn": two, "parallel_attn": parallel, **heads}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("embed.weight", "transformer.word_embeddings.weight")
        yield same("head.weight", "lm_head.weight")
        yield from module("norm", "transformer.ln_f")
        groups, width, two = ours["attention.n_kv_heads"], ours["attention.head_dim"], not ours.get("block.shared_norm", True)
        heads = SplitHeads(groups, [ours["attention.n_heads"] // groups * width, width, width])
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}", f"transformer.h.{i}"
            yield from module(f"{here}.attention_norm", f"{there}.{'ln_attn' if two else 'input_layernorm'}")
            yield from modules(tuple(f"{here}.attention.{name}" for name in "qkv"), f"{there}.self_attention.query_key_value", heads)
            for mine, theirs in _ALIKE.items():
                yield from module(f"{here}.{mine}", f"{there}.{theirs}")


FAMILY = Falcon()
