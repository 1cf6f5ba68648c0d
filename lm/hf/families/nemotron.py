"""Nemotron 3 and 4, Minitron.  Parmar et al. 2024, arXiv:2402.16819."""

from collections.abc import Iterator

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module
from lm.schema import Tree


class Nemotron(Llama):
    """Layer norms whose weight is the difference from 1, squared ReLU without a gate, and a half of each head rotated."""

    name = "nemotron"
    architecture = "NemotronForCausalLM"
    partial = 0.5
    fields = {
        **Llama.fields,
        "norm.eps": ("norm_eps", 1e-5),
        "ffn.activation": ("hidden_act", "relu2"),
    }
    fixed = {**Llama.fixed, "norm.kind": "layer", "norm.zero_centered": True, "ffn.gated": False}

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for name in ("up", "down"):
            yield from module(f"{here}.ffn.{name}", f"{there}.mlp.{name}_proj")


FAMILY = Nemotron()
