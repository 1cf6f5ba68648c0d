"""Mixtral.  Jiang et al. 2024, arXiv:2401.04088."""

from collections.abc import Iterator
from typing import ClassVar

from lm.hf.families.mistral import Mistral
from lm.hf.io.family import Pair, experts, same, without
from lm.schema import Tree


class Mixtral(Mistral):
    """Mistral with a mixture of experts in every layer; each expert's matrices are tensors of their own in the file."""

    name = "mixtral"
    architecture = "MixtralForCausalLM"
    theta: ClassVar[float | None] = 1e6
    fields = {
        **without(Mistral.fields, "ffn.*"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.window": ("sliding_window", None),
        "ffn.expert.hidden": "intermediate_size",
        "ffn.expert.activation": ("hidden_act", "silu"),
        "ffn.n_experts": ("num_local_experts", 8),
        "ffn.top_k": ("num_experts_per_tok", 2),
        "ffn.router.jitter": ("router_jitter_noise", 0.0),
    }
    fixed = {
        "kind": "decoder", "norm.kind": "rms", "norm.place": "pre", "attention.kind": "gqa", "ffn.kind": "moe", "ffn.expert.gated": True,
        "ffn.router.kind": "softmax", "block.kind": "sequential",
    }  # fmt: skip

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """w1 is the gate, w3 goes up and w2 down."""
        yield same(f"{here}.ffn.router.weight", f"{there}.block_sparse_moe.gate.weight")
        for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            yield experts(f"{here}.ffn.experts.{name}", f"{there}.block_sparse_moe.experts.*.{theirs}.weight", ours["ffn.n_experts"])


FAMILY = Mixtral()
