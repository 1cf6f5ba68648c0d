"""GPT-J.  Wang & Komatsuzaki 2021, "GPT-J-6B: a 6 billion parameter autoregressive language model"."""

import math
from collections.abc import Iterator
from typing import ClassVar

from lm.hf.families.gpt2 import GPT2
from lm.hf.io.family import Family, Pair, module, same
from lm.schema import Tree


class GPTJ(Family):
    """Attention without biases and feed-forward side by side behind one norm, neighbours in a part of each head rotated, a bias on the
    head. transformers rotates by a table, which has one base and no scaling."""

    name = "gptj"
    architecture = "GPTJForCausalLM"
    prefix = "transformer."
    partial = 1.0
    ignored: ClassVar[tuple[str, ...]] = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias|embed_positions)",)
    fields = {
        **GPT2.fields,
        "attention.dropout": ("attn_pdrop", 0.0),
        "dropout": ("resid_pdrop", 0.0),
        "ffn.activation": ("activation_function", "gelu_new"),
        "head.tied": ("tie_word_embeddings", False),
    }
    further = ("rotary_dim",)
    idle: ClassVar[tuple[str, ...]] = ("rotary", "scale_attn_weights")
    fixed = {
        "kind": "decoder", "norm.kind": "layer", "norm.place": "pre", "attention.kind": "gqa", "ffn.kind": "mlp", "ffn.gated": False,
        "ffn.bias": True, "position.kind": "rope", "position.theta": 10000.0, "position.interleaved": True, "block.kind": "parallel",
        "block.shared_norm": True, "head.bias": True,
    }  # fmt: skip

    def read(self, hf: Tree) -> Tree:
        rotary, head_dim = hf.get("rotary_dim", 64), hf["n_embd"] // hf["n_head"]
        exact = rotary / head_dim
        return {"position.fraction": exact if int(head_dim * exact) == rotary else math.nextafter(exact, 1.0)}  # which is rounded down

    def write(self, ours: Tree) -> Tree:
        usual = {"activation_function": "gelu_new"} if ours.get("ffn.activation") == "gelu_tanh" else {}
        rotary = int(ours.get("attention.head_dim", 0) * ours.get("position.fraction", 1.0))
        return {**usual, "embd_pdrop": ours["dropout"], "rotary_dim": rotary}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("embed.weight", "transformer.wte.weight")
        yield from module("head", "lm_head")
        yield from module("norm", "transformer.ln_f")
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}", f"transformer.h.{i}"
            yield from module(f"{here}.attention_norm", f"{there}.ln_1")
            yield from self.projections(here, there, ours)
            yield same(f"{here}.attention.o.weight", f"{there}.attn.out_proj.weight")
            yield from module(f"{here}.ffn.up", f"{there}.mlp.fc_in")
            yield from module(f"{here}.ffn.down", f"{there}.mlp.fc_out")

    def projections(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of the projections to queries, keys and values."""
        for name in "qkv":
            yield same(f"{here}.attention.{name}.weight", f"{there}.attn.{name}_proj.weight")


FAMILY = GPTJ()
