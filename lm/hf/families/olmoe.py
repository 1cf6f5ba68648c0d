"""OLMoE.  Muennighoff et al. 2024, arXiv:2409.02060."""

from collections.abc import Iterator

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, gated, without
from lm.schema import Tree


class OLMoE(Llama):
    """Norms on queries and keys over all heads together, and a mixture of experts in every layer; nothing is clipped (clip_qkv)."""

    name = "olmoe"
    architecture = "OlmoeForCausalLM"
    renamed = {"num_local_experts": "num_experts"}
    fields = {
        **without(Llama.fields, "ffn.*", "attention.head_dim"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "ffn.expert.hidden": ("intermediate_size", 2048),
        "ffn.expert.activation": ("hidden_act", "silu"),
        "ffn.n_experts": ("num_experts", 64),
        "ffn.top_k": ("num_experts_per_tok", 8),
        "ffn.router.normalize": ("norm_topk_prob", False),
    }
    fixed = {
        "kind": "decoder", "norm.kind": "rms", "norm.place": "pre", "attention.kind": "gqa", "attention.qk_norm": "full",
        "ffn.kind": "moe", "ffn.expert.gated": True, "ffn.router.kind": "softmax", "block.kind": "sequential",
    }  # fmt: skip
    fixed_there = {"clip_qkv": None, "pad_token_id": None}  # where none is told, transformers takes a number of its own

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from gated(f"{here}.ffn", f"{there}.mlp", ours["ffn.n_experts"])


FAMILY = OLMoE()
