"""Jamba.  Lieber et al. 2024, arXiv:2403.19887; Jamba 1.5, arXiv:2408.12570."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.llama import Llama
from lm.hf.families.mamba import FAMILY as MAMBA
from lm.hf.io.family import Pair, activation, experts, hf_activation, module, same, without
from lm.nn.model_config import shortest
from lm.schema import Tree

_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
_EXPERTS = {"num_experts": ("n_experts", 16), "num_experts_per_tok": ("top_k", 2)}


class Jamba(Llama):
    """Mamba with norms within in most layers, attention without positions in the others, and experts in every n-th layer.

    With mamba_proj_bias, which no published model has, transformers lets padding into the convolution of the tokens behind it; lm does not.
    """

    name = "jamba"
    architecture = "JambaForCausalLM"
    last_norm = "model.final_layernorm"
    recurrent_kind = "mamba"
    theta = None
    unadapted = ("dt_proj",)  # whose matrix it reads past the module
    fields = {
        **without(Llama.fields, "ffn.*", "*_bias"),
        "max_seq_len": ("max_position_embeddings", 262144),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
    }
    further = (
        "attn_layer_offset", "attn_layer_period", "expert_layer_offset", "expert_layer_period", "hidden_act", "intermediate_size",
        "mamba_conv_bias", "mamba_d_conv", "mamba_d_state", "mamba_dt_rank", "mamba_expand", "mamba_proj_bias", *_EXPERTS,
    )  # fmt: skip
    idle = (
        "calc_logits_for_entire_prompt", "mamba_inner_layernorms", "n_ctx", "num_logits_to_keep", "use_associative_scan",
        "use_mamba_kernels", "use_mambapy",
    )  # fmt: skip
    respelled = (
        "attn_layer_offset", "attn_layer_period", "expert_layer_offset", "expert_layer_period", "mamba_dt_rank", "num_experts_per_tok",
    )  # fmt: skip
    fixed = {
        "kind": "decoder", "norm.kind": "rms", "norm.place": "pre", "attention.kind": "gqa", "attention.qkv_bias": False,
        "attention.out_bias": False, "position.kind": "none", "block.kind": "sequential",
    }  # fmt: skip

    def read(self, hf: Tree) -> Tree:
        n, d = hf["num_hidden_layers"], hf["hidden_size"]
        every, at = hf.get("attn_layer_period", 8), hf.get("attn_layer_offset", 4)
        pattern = shortest(["attention" if layer % every == at else "recurrent" for layer in range(n)])
        if "attention" not in pattern:
            raise ConfigError(f"config.json: attn_layer_offset={at} is of no layer of {n}, and transformers does not run so. Lower it.")
        if (act := activation(hf, "hidden_act", "silu")) != "silu" and "recurrent" in pattern:
            raise ConfigError(f"config.json: hidden_act={act!r} is of the convolutions too, which are silu's in lm. Import another model.")
        rank = hf.get("mamba_dt_rank", "auto")
        state = {
            "kind": "mamba", "width": hf.get("mamba_expand", 2) * d, "state_dim": hf.get("mamba_d_state", 16),
            "rank": -(-d // 16) if rank == "auto" else rank, "kernel": hf.get("mamba_d_conv", 4),
            "kernel_bias": hf.get("mamba_conv_bias", True), "bias": hf.get("mamba_proj_bias", False),
            "inner_eps": hf.get("rms_norm_eps", 1e-6), "inner_weight": True,
        }  # fmt: skip
        recurrent = {"recurrent": state} if "recurrent" in pattern else {}
        return {"pattern": pattern, **recurrent, **self._feed_forward(hf, act)}

    def _feed_forward(self, hf: Tree, act: str) -> Tree:
        """Raises ConfigError where others than the last of every n layers have experts."""
        one = {"kind": "mlp", "gated": True, "activation": act, "hidden": hf.get("intermediate_size", 14336)}
        n, every, at = hf["num_hidden_layers"], hf.get("expert_layer_period", 2), hf.get("expert_layer_offset", 1)
        if hf.get("num_experts", 16) == 1 or at >= n:
            return {"ffn": one}
        if at != every - 1:
            raise ConfigError(
                f"config.json: expert_layer_offset={at} of expert_layer_period={every} is not the last layer of these. lm has no other"
                " pattern; import another model."
            )
        counts = {ours: hf.get(key, missing) for key, (ours, missing) in _EXPERTS.items()}
        router = {"kind": "softmax", "normalize": False}
        return {"ffn": {"kind": "moe", "expert": one, "every": every, "dense": one if every > 1 else None, "router": router, **counts}}

    def write(self, ours: Tree) -> Tree:
        pattern, moe = ours["pattern"], ours["ffn.kind"] == "moe"
        one = "ffn.expert" if moe else "ffn"
        names = {"d_state": "state_dim", "d_conv": "kernel", "dt_rank": "rank", "conv_bias": "kernel_bias", "proj_bias": "bias"}
        there = {f"mamba_{key}": ours[f"recurrent.{name}"] for key, name in names.items() if f"recurrent.{name}" in ours}
        expand = {"mamba_expand": ours["recurrent.width"] // ours["d_model"]} if "recurrent.width" in ours else {}
        counts = {key: ours[f"ffn.{name}"] for key, (name, _) in _EXPERTS.items()} if moe else {"num_experts": 1}
        every = ours.get("ffn.every", 1)
        return {
            "attn_layer_period": len(pattern), "attn_layer_offset": pattern.index("attention") if "attention" in pattern else 0, **there,
            **expand, **counts, "expert_layer_period": every, "expert_layer_offset": every - 1,
            "hidden_act": hf_activation(ours.get(f"{one}.activation")), "intermediate_size": ours.get(f"{one}.hidden"),
        }  # fmt: skip

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for slot, theirs in {"attention": "input", "recurrent": "input", "ffn": "pre_ff"}.items():
            yield from module(f"{here}.{slot}_residual.norm", f"{there}.{theirs}_layernorm")
        for name in "qkvo":
            yield from module(f"{here}.attention.{name}", f"{there}.self_attn.{name}_proj")
        if "recurrent.width" in ours:
            yield from MAMBA.mixer(f"{here}.recurrent", f"{there}.mamba", ours)
            yield from (same(f"{here}.recurrent.norms.{i}.weight", f"{there}.mamba.{name}.weight") for i, name in enumerate(_NORMS))
        yield from self.ffn(f"{here}.ffn", f"{there}.feed_forward", ours)

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for name in ("gate", "up", "down"):
            yield same(f"{here}.{name}.weight", f"{there}.{name}_proj.weight")
            if "ffn.n_experts" in ours:
                yield experts(f"{here}.experts.{name}", f"{there}.experts.*.{name}_proj.weight", ours["ffn.n_experts"])
        yield same(f"{here}.router.weight", f"{there}.router.weight")


FAMILY = Jamba()
