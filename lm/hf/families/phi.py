"""Phi-1, Phi-1.5 and Phi-2.  Li et al. 2023, arXiv:2309.05463."""

from collections.abc import Iterator

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module, without
from lm.schema import Tree


class Phi(Llama):
    """Attention and feed-forward side by side behind one norm, biases everywhere, a part of each head rotates."""

    name = "phi"
    architecture = "PhiForCausalLM"
    last_norm = "model.final_layernorm"
    partial = 0.5
    fields = {
        **without(Llama.fields, "*bias", "*head_dim"),
        "norm.eps": ("layer_norm_eps", 1e-5),
        "ffn.activation": ("hidden_act", "gelu_new"),
        "dropout": ("resid_pdrop", 0.0),
    }
    fixed = {
        **Llama.fixed, "norm.kind": "layer", "ffn.gated": False, "ffn.bias": True, "attention.qkv_bias": True, "attention.out_bias": True,
        "block.kind": "parallel", "block.shared_norm": True, "head.bias": True,
    }  # fmt: skip
    fixed_there = {"qk_layernorm": False}

    def write(self, ours: Tree) -> Tree:
        return {"embd_pdrop": ours["dropout"]}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield from super().pairs(ours)
        yield Pair(("head.bias",), ("lm_head.bias",))

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from module(f"{here}.attention_norm", f"{there}.input_layernorm")
        for name, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "dense")):
            yield from module(f"{here}.attention.{name}", f"{there}.self_attn.{theirs}")
        yield from module(f"{here}.ffn.up", f"{there}.mlp.fc1")
        yield from module(f"{here}.ffn.down", f"{there}.mlp.fc2")


FAMILY = Phi()
