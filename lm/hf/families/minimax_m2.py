"""MiniMax-M2.  MiniMax 2025, github.com/MiniMax-AI/MiniMax-M2."""

from collections.abc import Iterator

from lm.hf.families.mixtral import Mixtral
from lm.hf.io.family import Pair, same, without
from lm.hf.options.rope import read_rope
from lm.schema import Tree


class MiniMaxM2(Mixtral):
    """Mixtral with sigmoid scores and a correction bias, norms over all heads together, and a part of each head rotated."""

    name = "minimax_m2"
    architecture = "MiniMaxM2ForCausalLM"
    theta = 5e6
    partial = 1.0
    fields = {
        **without(Mixtral.fields, "attention.window", "ffn.router.jitter"),
        "norm.eps": ("rms_norm_eps", 1e-6),
        "attention.head_dim": ("head_dim", 128),
        "ffn.expert.hidden": ("intermediate_size", 1536),
        "ffn.n_experts": ("num_local_experts", 256),
        "ffn.top_k": ("num_experts_per_tok", 8),
    }
    renamed = {"num_experts": "num_local_experts"}
    further = ("rotary_dim", "router_jitter_noise")  # the latter acts in training alone
    fixed = {**Mixtral.fixed, "attention.qk_norm": "full", "ffn.router.kind": "sigmoid"}
    fixed_there = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}

    def read(self, hf: Tree) -> Tree:
        turned = hf.get("rotary_dim")
        part = {} if turned is None else {"partial_rotary_factor": turned / hf.get("head_dim", 128)}
        return read_rope({**part, **hf}, self.theta)

    def write(self, ours: Tree) -> Tree:
        return {"rotary_dim": int(ours["attention.head_dim"] * ours.get("position.fraction", 1.0))}

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from super().ffn(here, there, ours)
        yield same(f"{here}.ffn.router.correction_bias", f"{there}.block_sparse_moe.e_score_correction_bias")


FAMILY = MiniMaxM2()
