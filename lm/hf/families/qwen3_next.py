"""Qwen3-Next.  Qwen 2025, "Qwen3-Next: towards ultimate training and inference efficiency"."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.qwen2_moe import Qwen2MoE
from lm.hf.families.qwen3_moe import Qwen3MoE
from lm.hf.io.family import Pair, module, modules, without
from lm.hf.io.transforms import Chain, Join, SplitHeads, Squeeze
from lm.hf.options.delta import DELTA, LINEAR, counts, state, widths
from lm.hf.options.pattern import read_pattern, write_pattern
from lm.schema import Tree

_USUAL = {"n_heads": 32, "n_k_heads": 16, "k_dim": 128, "v_dim": 128, "kernel": 4}


class Qwen3Next(Qwen2MoE):
    """The gated delta rule in most layers, gated attention in the others, of each head a quarter rotated, and norms around 0."""

    name = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    recurrent_kind = "gated_delta"
    partial = 0.25
    ignored = (*Qwen2MoE.ignored, r"mtp\..*")
    fields = {
        **without(Qwen2MoE.fields, "*window"),
        "attention.n_kv_heads": ("num_key_value_heads", 2), "attention.head_dim": ("head_dim", 256),
        **dict.fromkeys(("attention.qkv_bias", "attention.out_bias"), ("attention_bias", False)),
        "ffn.expert.hidden": ("moe_intermediate_size", 512), "ffn.shared_hidden": ("shared_expert_intermediate_size", 512),
        "ffn.top_k": ("num_experts_per_tok", 10), "ffn.router.normalize": ("norm_topk_prob", True),
    }  # fmt: skip
    further = (
        "layer_types", "full_attention_interval", "num_experts", "num_local_experts", "mlp_only_layers", "intermediate_size",
        *DELTA.values(),
    )  # fmt: skip
    respelled = ("layer_types", *Qwen3MoE.respelled)
    fixed = {
        **without(Qwen2MoE.fixed, "attention.out_bias"), "norm.zero_centered": True,
        "attention.qk_norm": "head", "attention.out_gate": "element", "attention.window": None,
    }  # fmt: skip

    def read(self, hf: Tree) -> Tree:
        mixture = Qwen3MoE.read(self, {"num_experts": 512, "intermediate_size": 5632, **hf}) | {"attention.window": None}
        return {**mixture, **self.mixers(hf)}

    def mixers(self, hf: Tree) -> Tree:
        """Returns our options of what mixes tokens."""
        n, every = hf["num_hidden_layers"], hf.get("full_attention_interval", 4)
        types = hf.get("layer_types") or [LINEAR if (i + 1) % every else "full_attention" for i in range(n)]
        pattern = read_pattern(types, n, (LINEAR,))
        if "recurrent" in pattern and (act := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ConfigError(f"config.json: hidden_act={act!r} is of the convolutions too, which are silu's in lm. Import another model.")
        sizes = {ours: hf.get(key, _USUAL[ours]) for ours, key in DELTA.items()}
        delta: Tree = {"recurrent": {"kind": "gated_delta", "eps": hf.get("rms_norm_eps", 1e-6), **sizes}} if "recurrent" in pattern else {}
        return {"pattern": pattern, **delta}

    def write(self, ours: Tree) -> Tree:
        return {**Qwen3MoE.write(self, ours), **self.write_mixers(ours)}

    def write_mixers(self, ours: Tree) -> Tree:
        """Returns the keys that `mixers` reads."""
        delta = {key: ours[f"recurrent.{name}"] for name, key in DELTA.items() if f"recurrent.{name}" in ours}
        return {"layer_types": write_pattern(ours, LINEAR), **delta}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for pair in super().block(here, there, ours):
            if pair.theirs[0].startswith(f"{there}.self_attn.q_proj"):
                gate = pair.ours[0].replace(".q.", ".gate.")
                pair = Pair((*pair.ours, gate), pair.theirs, SplitHeads(ours["attention.n_heads"], [ours["attention.head_dim"]] * 2))
            yield pair
        yield from module(f"{here}.recurrent_residual.norm", f"{there}.input_layernorm")
        if "recurrent.k_dim" not in ours:
            return
        here, there = f"{here}.recurrent", f"{there}.linear_attn"
        yield from self.inputs(here, there, ours)
        yield Pair((f"{here}.kernel",), (f"{there}.conv1d.weight",), Squeeze())
        yield from module(f"{here}.o", f"{there}.out_proj")
        yield from state(here, there, "norm")

    def inputs(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of the matrices that read a recurrent layer's input."""
        (groups, heads), k, v = counts(ours), ours["recurrent.k_dim"], ours["recurrent.v_dim"]
        r = heads // groups  # of each head of keys come its query, its key, and the values and gates of those that share it
        parts = Chain(SplitHeads(groups, [k, k, r * v, r * v]), Join(widths(ours)))
        yield from modules((f"{here}.qkv", f"{here}.gate"), f"{there}.in_proj_qkvz", parts)
        yield from modules((f"{here}.beta", f"{here}.rate"), f"{there}.in_proj_ba", SplitHeads(groups, [r, r]))


FAMILY = Qwen3Next()
