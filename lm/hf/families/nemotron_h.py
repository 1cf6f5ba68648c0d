"""Nemotron-H and Nemotron 3.  NVIDIA 2025, arXiv:2504.03624 and arXiv:2512.20856."""

from collections.abc import Iterator
from typing import Any

from lm.errors import ConfigError
from lm.hf.io.family import Family, Pair, activation, experts, hf_activation, module, same
from lm.hf.options.mamba import mamba_pairs
from lm.nn.model_config import ModelConfig, shortest
from lm.schema import Tree

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Of hybrid_override_pattern, in published files."""
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_SLOTS = {"linear_attention": "recurrent", "full_attention": "attention", "mlp": "ffn", "moe": "ffn"}
_STATE: dict[str, tuple[str, Any]] = {
    "n_heads": ("mamba_num_heads", 128), "head_dim": ("mamba_head_dim", 64), "state_dim": ("ssm_state_size", 128),
    "groups": ("n_groups", 8), "kernel": ("conv_kernel", 4), "kernel_bias": ("use_conv_bias", True), "bias": ("use_bias", False),
    "eps": ("layer_norm_epsilon", 1e-5),
}  # fmt: skip
_EXPERTS: dict[str, tuple[str, Any]] = {
    "n_experts": ("n_routed_experts", 8), "top_k": ("num_experts_per_tok", 2), "expert.hidden": ("moe_intermediate_size", 7688),
    "shared_hidden": ("moe_shared_expert_intermediate_size", 7688), "latent_dim": ("moe_latent_size", None),
    "router.n_groups": ("n_group", 1), "router.top_groups": ("topk_group", 1), "router.scale": ("routed_scaling_factor", 1.0),
    "router.normalize": ("norm_topk_prob", True),
}  # fmt: skip
_NO_FLOOR = 1e-30  # a least step that is none: transformers takes its logarithm


class NemotronH(Family):
    """Each layer is Mamba-2, attention without positions, a feed-forward, or experts with a shared one and DeepSeek-V3's router.

    Where transformers decodes token by token, it does without the least step (time_step_min) that it has for whole texts; lm has it for
    both. With use_bias, which no published model has, it lets padding into the convolution of the tokens behind it; lm does not.
    """

    name = "nemotron_h"
    architecture = "NemotronHForCausalLM"
    recurrent_kind = "mamba2"
    prefix = "backbone."
    built = {"backbone.": "model."}
    unadapted = ("out_proj",)  # whose matrix its kernels read past the module
    ignored = (r"mtp\..*",)  # predicts further tokens; transformers leaves it out, too
    renamed = {
        "layer_types": "layers_block_type", "num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min", "mamba_conv_bias": "use_conv_bias",
        "attention_head_dim": "head_dim",
    }  # fmt: skip
    fields = {
        "vocab_size": ("vocab_size", 131072),
        "max_seq_len": ("max_position_embeddings", 4096),
        "d_model": ("hidden_size", 4096),
        "n_layers": "num_hidden_layers",
        "norm.eps": ("layer_norm_epsilon", 1e-5),
        "attention.n_heads": ("num_attention_heads", 32),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
        "attention.head_dim": ("head_dim", 128),
        "attention.dropout": ("attention_dropout", 0.0),
    }
    further = (
        "layers_block_type", "hybrid_override_pattern", "intermediate_size", "mlp_hidden_act", "mlp_bias", "time_step_min",
        *(key for options in (_STATE, _EXPERTS) for key, _ in options.values()),
    )  # fmt: skip
    idle = (
        "chunk_size", "expand", "mamba_proj_bias", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mtp_hybrid_override_pattern",
        "mtp_layers_block_type", "norm_eps", "num_logits_to_keep", "num_nextn_predict_layers", "partial_rotary_factor",
        "rescale_prenorm_residual", "residual_in_fp32", "rms_norm_eps", "rope_theta", "time_step_floor", "time_step_limit", "time_step_max",
        "time_step_rank", "use_mamba_kernels",
    )  # fmt: skip
    respelled = ("layers_block_type",)
    fixed = {
        "kind": "decoder", "norm.kind": "rms", "norm.place": "pre", "position.kind": "none", "attention.kind": "gqa",
        "attention.qkv_bias": False, "attention.out_bias": False, "block.kind": "single", "head.tied": False,
    }  # fmt: skip
    fixed_there = {
        "attention_bias": False, "mamba_hidden_act": "silu", "n_shared_experts": 1, "sliding_window": None, "tie_word_embeddings": False,
    }  # fmt: skip

    def config(self, hf: Tree) -> ModelConfig:
        return super().config({**hf, "num_hidden_layers": len(_types(hf))})

    def read(self, hf: Tree) -> Tree:
        types = _types(hf)
        pattern = shortest([_SLOTS[name] for name in types])
        if "attention" not in pattern:
            raise ConfigError("config.json: layers_block_type has no attention, without which transformers does not run. Name it once.")
        least = hf.get("time_step_min", 0.001)
        state = {"recurrent.kind": "mamba2", "recurrent.step_floor": least if least > _NO_FLOOR else 0.0, **_told(hf, "recurrent", _STATE)}
        return {"pattern": pattern, **(state if "recurrent" in pattern else {}), **self._feed_forward(hf, types)}

    def _feed_forward(self, hf: Tree, types: list[str]) -> Tree:
        """Raises ConfigError where a layer without experts is behind one that has some."""
        one: Tree = {"gated": False, "activation": activation(hf, "mlp_hidden_act", "relu2"), "bias": hf.get("mlp_bias", False)}
        dense = {**one, "kind": "mlp", "hidden": hf.get("intermediate_size", 21504)}
        if "moe" not in types:
            return {f"ffn.{name}": value for name, value in dense.items()}
        if one["bias"]:
            raise ConfigError("config.json: mlp_bias is of the shared expert alone, and in lm of all or none. Import another model.")
        first = len(types) - types[::-1].index("mlp") if "mlp" in types else 0
        if "moe" in types[:first]:
            raise ConfigError("config.json: layers_block_type has mlp behind moe, and in lm dense layers come first. Import another model.")
        expert = {f"ffn.expert.{name}": value for name, value in one.items()}
        moe = {"ffn.kind": "moe", "ffn.n_shared": 1, "ffn.router.kind": "sigmoid", "ffn.first_dense": first, **_told(hf, "ffn", _EXPERTS)}
        return {**moe, **expert, "ffn.dense": dense if first else None}

    def write(self, ours: Tree) -> Tree:
        slots = [ours["pattern"][layer % len(ours["pattern"])] for layer in range(ours["n_layers"])]
        mixing = {slot: name for name, slot in _SLOTS.items() if slot != "ffn"}
        moe, first = ours["ffn.kind"] == "moe", ours.get("ffn.first_dense", 0)
        kinds = ["moe" if moe and layer >= first else "mlp" for layer in range(ours["n_layers"])]
        types = [mixing.get(slot, kind) for slot, kind in zip(slots, kinds, strict=True)]
        one, dense = ("ffn.expert", "ffn.dense") if moe else ("ffn", "ffn")
        options = {"recurrent": _STATE, **({"ffn": _EXPERTS} if moe else {})}
        there = {key: ours[f"{at}.{name}"] for at, keys in options.items() for name, (key, _) in keys.items() if f"{at}.{name}" in ours}
        letters = {name: letter for letter, name in _LETTERS.items()}
        return {
            "layers_block_type": types, "hybrid_override_pattern": "".join(map(letters.__getitem__, types)),
            "mlp_hidden_act": hf_activation(ours.get(f"{one}.activation")), "mlp_bias": ours.get(f"{one}.bias", False), **there,
            **({"intermediate_size": ours[f"{dense}.hidden"]} if f"{dense}.hidden" in ours else {}),
            **({"time_step_min": max(ours["recurrent.step_floor"], _NO_FLOOR)} if "recurrent.step_floor" in ours else {}),
        }  # fmt: skip

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("embed.weight", "backbone.embeddings.weight")
        yield same("head.weight", "lm_head.weight")
        yield from module("norm", "backbone.norm_f")
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}", f"backbone.layers.{i}"
            for slot in ("attention", "recurrent", "ffn"):
                yield from module(f"{here}.{slot}_residual.norm", f"{there}.norm")
            for name in "qkvo":
                yield from module(f"{here}.attention.{name}", f"{there}.mixer.{name}_proj")
            if "recurrent.n_heads" in ours:
                yield from mamba_pairs(f"{here}.recurrent", f"{there}.mixer", ours)
            yield from self.ffn(f"{here}.ffn", f"{there}.mixer", ours)

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of a feed-forward, and those of a layer with experts."""
        for name in ("up", "down"):
            yield from module(f"{here}.{name}", f"{there}.{name}_proj")
        if "ffn.n_experts" not in ours:
            return
        for name in ("up", "down"):
            yield same(f"{here}.shared.{name}.weight", f"{there}.shared_experts.{name}_proj.weight")
            yield experts(f"{here}.experts.{name}", f"{there}.experts.*.{name}_proj.weight", ours["ffn.n_experts"])
        yield same(f"{here}.router.weight", f"{there}.gate.weight")
        yield same(f"{here}.router.correction_bias", f"{there}.gate.e_score_correction_bias")
        for name, theirs in {"latent_down": "fc1_latent_proj", "latent_up": "fc2_latent_proj"}.items():
            yield same(f"{here}.{name}.weight", f"{there}.{theirs}.weight")


def _types(hf: Tree) -> list[str]:
    """Returns a name of each layer. Raises ConfigError for unknown ones."""
    told = hf.get("layers_block_type") or hf.get("hybrid_override_pattern") or ["linear_attention", "moe", "full_attention", "mlp"]
    names = [told] if isinstance(told, str) else told
    if not isinstance(names, list) or any(not isinstance(name, str) for name in names):
        raise ConfigError(f"config.json: layers_block_type={told!r} does not fit, which has a name for each layer. Restore the file.")
    types = [_LETTERS.get(name, name) for name in told] if isinstance(told, str) else [_OLDER.get(name, name) for name in told]
    if unknown := [name for name in types if name not in _SLOTS]:
        known = ", ".join([*_SLOTS, *_OLDER])
        raise ConfigError(f"config.json: layers_block_type has {unknown[0]!r}, and known are {known}. Import another model.")
    return types


def _told(hf: Tree, at: str, options: dict[str, tuple[str, Any]]) -> Tree:
    return {f"{at}.{name}": hf.get(key, missing) for name, (key, missing) in options.items()}


FAMILY = NemotronH()
