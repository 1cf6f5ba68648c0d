"""OPT.  Zhang et al. 2022, arXiv:2205.01068."""

from collections.abc import Iterator
from typing import ClassVar

from lm.errors import ConfigError
from lm.hf.io.family import Family, Pair, module, same
from lm.hf.io.transforms import SkipRows
from lm.schema import Tree


class OPT(Family):
    """GPT-2 with ReLU, and a table of positions that starts with two unused rows. That of 350M has norms behind its sublayers, and narrow
    embeddings."""

    name = "opt"
    architecture = "OPTForCausalLM"
    prefix = "model."
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": ("max_position_embeddings", 2048),
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "attention.n_heads": "num_attention_heads",
        "attention.dropout": ("attention_dropout", 0.0),
        "attention.qkv_bias": ("enable_bias", True),
        "attention.out_bias": ("enable_bias", True),
        "ffn.bias": ("enable_bias", True),
        "ffn.hidden": "ffn_dim",
        "ffn.activation": ("activation_function", "relu"),
        "dropout": ("dropout", 0.1),
        "head.tied": ("tie_word_embeddings", True),
    }
    stack: ClassVar[tuple[str, str, str]] = ("model.decoder", "final_layer_norm", "lm_head")  # names of it, its last norm, and the head
    further: ClassVar[tuple[str, ...]] = ("word_embed_proj_dim", "do_layer_norm_before", "layerdrop", "activation_dropout")
    fixed = {
        "kind": "decoder", "norm.kind": "layer", "norm.eps": 1e-5, "position.kind": "learned", "attention.kind": "gqa", "ffn.kind": "mlp",
        "ffn.gated": False, "block.kind": "sequential",
    }  # fmt: skip
    fixed_there = {"_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True}

    def read(self, hf: Tree) -> Tree:
        width = hf.get("word_embed_proj_dim") or hf["hidden_size"]
        narrow = width != hf["hidden_size"]
        if narrow and not hf.get("tie_word_embeddings", True):
            raise ConfigError(f"config.json: word_embed_proj_dim={width} needs a tied head in lm. Import another model.")
        place = "pre" if hf.get("do_layer_norm_before", True) else "post"
        return {"norm.place": place, "embed.factorized": {"width": width} if narrow else None}

    def write(self, ours: Tree) -> Tree:
        width = ours.get("embed.factorized.width", ours["d_model"])
        return {"word_embed_proj_dim": width, "do_layer_norm_before": ours["norm.place"] == "pre"}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        stack, norm, head = self.stack
        yield same("embed.weight", f"{stack}.embed_tokens.weight")
        yield same("head.weight", f"{head}.weight")
        yield Pair(("position.weight",), (f"{stack}.embed_positions.weight",), SkipRows(2))
        yield from module("norm", f"{stack}.{norm}")
        yield same("widen.weight", f"{stack}.project_in.weight")
        yield same("head.narrow.weight", f"{stack}.project_out.weight")
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}", f"{stack}.layers.{i}"
            for name, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj")):
                yield from module(f"{here}.attention.{name}", f"{there}.self_attn.{theirs}")
            yield from module(f"{here}.attention_residual.norm", f"{there}.self_attn_layer_norm")
            yield from module(f"{here}.ffn_residual.norm", f"{there}.final_layer_norm")
            yield from module(f"{here}.ffn.up", f"{there}.fc1")
            yield from module(f"{here}.ffn.down", f"{there}.fc2")


FAMILY = OPT()
