"""StableLM.  Bellagente et al. 2024, arXiv:2402.17834."""

from collections.abc import Iterator

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module, without
from lm.schema import Tree


class StableLM(Llama):
    """Llama with layer norms, a part of each head rotated, and, in some, both sublayers side by side behind one norm."""

    name = "stablelm"
    architecture = "StableLmForCausalLM"
    partial = 0.25
    fields = {
        **without(Llama.fields, "*out_bias", "*head_dim", "*ffn.bias"),
        "norm.eps": ("layer_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 32),
        "attention.qkv_bias": ("use_qkv_bias", False),
    }
    further = ("use_parallel_residual", "hidden_dropout")
    fixed = without(Llama.fixed, "block.kind") | {"norm.kind": "layer"}
    fixed_there = {"qk_layernorm": False}

    def read(self, hf: Tree) -> Tree:
        return {"block.kind": "parallel" if hf.get("use_parallel_residual") else "sequential"}

    def write(self, ours: Tree) -> Tree:
        return {"use_parallel_residual": ours["block.kind"] == "parallel"}

    def norms(self, here: str, there: str) -> Iterator[Pair]:
        yield from super().norms(here, there)
        yield from module(f"{here}.attention_norm", f"{there}.input_layernorm")  # of both, side by side


FAMILY = StableLM()
