"""GPT-2.  Radford et al. 2019."""

from collections.abc import Iterator
from typing import ClassVar

from lm.hf.io.family import Family, Pair, module, modules, same
from lm.hf.io.transforms import Chain, Split, Transpose
from lm.schema import Tree

OUT = {"attention.o": "attn.c_proj", "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"}


class GPT2(Family):
    """Its linear layers are stored as (in, out), and q, k and v as one."""

    name = "gpt2"
    architecture = "GPT2LMHeadModel"
    prefix = "transformer."
    ignored = (r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",)
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": "n_positions",
        "d_model": "n_embd",
        "n_layers": "n_layer",
        "norm.eps": ("layer_norm_epsilon", 1e-5),
        "attention.n_heads": "n_head",
        "attention.dropout": ("attn_pdrop", 0.1),
        "dropout": ("resid_pdrop", 0.1),
        "ffn.hidden": ("n_inner", None),
        "ffn.activation": "activation_function",
        "head.tied": ("tie_word_embeddings", True),
    }
    idle: ClassVar[tuple[str, ...]] = ("n_ctx",)
    fixed = {
        "kind": "decoder", "norm.kind": "layer", "norm.place": "pre", "position.kind": "learned", "attention.kind": "gqa",
        "attention.qkv_bias": True, "attention.out_bias": True, "ffn.kind": "mlp", "ffn.gated": False, "ffn.bias": True,
        "block.kind": "sequential",
    }  # fmt: skip
    fixed_there = {
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    }  # fmt: skip

    def write(self, ours: Tree) -> Tree:
        usual = {"activation_function": "gelu_new"} if ours.get("ffn.activation") == "gelu_tanh" else {}
        return {**usual, "embd_pdrop": ours["dropout"]}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("embed.weight", "transformer.wte.weight")
        yield same("position.weight", "transformer.wpe.weight")
        yield same("head.weight", "lm_head.weight")
        yield from module("norm", "transformer.ln_f")
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}", f"transformer.h.{i}"
            yield from module(f"{here}.attention_residual.norm", f"{there}.ln_1")
            yield from module(f"{here}.ffn_residual.norm", f"{there}.ln_2")
            yield from self.linear(here, there, ours)

    def linear(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of a block's linear layers."""
        qkv = tuple(f"{here}.attention.{name}" for name in "qkv")
        yield from modules(qkv, f"{there}.attn.c_attn", Chain(Transpose(), Split([ours["d_model"]] * 3)))
        for name, theirs in OUT.items():
            yield from module(f"{here}.{name}", f"{there}.{theirs}", Transpose())


FAMILY = GPT2()
