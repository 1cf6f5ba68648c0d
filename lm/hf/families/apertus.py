"""Apertus.  Swiss AI Initiative 2025, arXiv:2509.14233."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module, same, without
from lm.nn.ffn.mlp import XIELU
from lm.schema import Tree


class Apertus(Llama):
    """Llama with norms on each head's queries and keys, and a feed-forward of xIELU without a gate."""

    name = "apertus"
    architecture = "ApertusForCausalLM"
    theta = 12000000.0
    usual_rope = {
        "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    fields = {
        **without(Llama.fields, "ffn.activation", "ffn.bias"),
        "norm.eps": ("rms_norm_eps", 1e-5),
    }
    fixed = {**Llama.fixed, "attention.qk_norm": "head", "ffn.gated": False, "ffn.activation": "xielu", "ffn.bias": False}
    fixed_there = {"hidden_act": "xielu", "mlp_bias": False, "post_norm": False, "qk_norm": True}  # but for the first, of published files

    def norms(self, here: str, there: str) -> Iterator[Pair]:
        for slot, theirs in (("attention", "attention"), ("ffn", "feedforward")):
            yield from module(f"{here}.{slot}_residual.norm", f"{there}.{theirs}_layernorm")

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for name in ("up", "down"):
            yield from module(f"{here}.ffn.{name}", f"{there}.mlp.{name}_proj")
        for name in ("alpha_p", "alpha_n"):
            yield same(f"{here}.ffn.act.{name}", f"{there}.mlp.act_fn.{name}")

    def constants(self, ours: Tree) -> Mapping[str, Tensor]:
        """Returns the two numbers of the activation that are not learned."""
        numbers = {"beta": XIELU.beta, "eps": XIELU.highest}
        layers = range(ours["n_layers"])
        return {f"model.layers.{i}.mlp.act_fn.{name}": torch.tensor(value) for i in layers for name, value in numbers.items()}


FAMILY = Apertus()
