"""Persimmon.  Adept 2023, "Releasing Persimmon-8B"."""

from collections.abc import Iterator

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module, modules, without
from lm.hf.io.transforms import SplitHeads
from lm.schema import Tree


class Persimmon(Llama):
    """Layer norms, those on each head's queries and keys too, squared ReLU without a gate, biases, and a half of each head rotated; q, k
    and v are stored as one, by head."""

    name = "persimmon"
    architecture = "PersimmonForCausalLM"
    last_norm = "model.final_layernorm"
    partial = 0.5
    fields = {
        **without(Llama.fields, "*bias", "*head_dim", "*n_kv_heads"),
        "norm.eps": ("layer_norm_eps", 1e-5),
        "ffn.activation": ("hidden_act", "relu2"),
        "dropout": ("hidden_dropout", 0.0),
    }
    further = ("qk_layernorm",)
    fixed = {
        **Llama.fixed, "norm.kind": "layer", "attention.qkv_bias": True, "attention.out_bias": True, "ffn.bias": True, "ffn.gated": False,
    }  # fmt: skip

    def read(self, hf: Tree) -> Tree:
        return {"attention.qk_norm": "head" if hf.get("qk_layernorm", True) else "none"}

    def write(self, ours: Tree) -> Tree:
        return {"qk_layernorm": ours["attention.qk_norm"] == "head"}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from self.norms(here, there)
        heads = SplitHeads(ours["attention.n_heads"], [ours["attention.head_dim"]] * 3)
        yield from modules(tuple(f"{here}.attention.{name}" for name in "qkv"), f"{there}.self_attn.query_key_value", heads)
        for name in "qk":
            yield from module(f"{here}.attention.{name}_norm", f"{there}.self_attn.{name}_layernorm")
        yield from module(f"{here}.attention.o", f"{there}.self_attn.dense")
        yield from module(f"{here}.ffn.up", f"{there}.mlp.dense_h_to_4h")
        yield from module(f"{here}.ffn.down", f"{there}.mlp.dense_4h_to_h")


FAMILY = Persimmon()
