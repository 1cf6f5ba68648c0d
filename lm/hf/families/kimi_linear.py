"""Kimi Linear.  Kimi Team 2025, arXiv:2510.26692."""

from collections.abc import Iterator
from typing import ClassVar

from lm.errors import ConfigError
from lm.hf.families.deepseek_moe import MTP_LAYERS, DeepSeekMoE
from lm.hf.families.deepseek_v3 import DeepSeekV3
from lm.hf.io.family import Pair, experts, module, same, without
from lm.hf.io.transforms import Chain, Join, Shaped, Squeeze
from lm.hf.options.delta import LINEAR, widths
from lm.hf.options.pattern import ATTENDS, read_first_dense, read_pattern, write_pattern
from lm.hf.options.rope import ROPE_KEYS
from lm.schema import Tree

_SIZES = {
    "head_dim": ("linear_head_dim", 128),
    "num_heads": ("linear_num_heads", 32),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", 4),
}
_FULL, _DELTA = "full_attn_layers", "kda_layers"
_MATRICES = {"beta": "b_proj", "o": "o_proj", "rate.0": "f_a_proj", "rate.1": "f_b_proj", "gate.0": "g_a_proj", "gate.1": "g_b_proj"}


class KimiLinear(DeepSeekV3):
    """The delta rule with a decay for each channel in most layers, latent attention that does not rotate in the others, and DeepSeek-V3's
    experts. It is written as published, which vLLM and SGLang read, and read with the names of transformers too."""

    name = "kimi_linear"
    architecture = "KimiLinearForCausalLM"
    recurrent_kind = "gated_delta"
    theta = None
    usual_dense = 9216
    fields = {
        **without(DeepSeekV3.fields, "ffn.first_dense", "position.interleaved", "head.tied"),
        "max_seq_len": ("model_max_length", 1048576),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.q_rank": ("q_lora_rank", None),
        "ffn.expert.hidden": ("moe_intermediate_size", 1024),
        "ffn.n_experts": ("num_experts", 256),
        "ffn.n_shared": ("num_shared_experts", 1),
        "ffn.top_k": ("num_experts_per_token", 8),
        "ffn.router.n_groups": ("num_expert_group", 1),
        "ffn.router.top_groups": ("topk_group", 1),
        "ffn.router.normalize": ("moe_renormalize", True),
        "ffn.router.scale": ("routed_scaling_factor", 2.446),
    }
    renamed = {
        "max_position_embeddings": "model_max_length", "num_local_experts": "num_experts", "n_shared_experts": "num_shared_experts",
        "num_experts_per_tok": "num_experts_per_token", "n_group": "num_expert_group", "norm_topk_prob": "moe_renormalize",
    }  # fmt: skip
    further: ClassVar[tuple[str, ...]] = (
        "intermediate_size", "num_key_value_heads", "first_k_dense_replace", "mlp_layer_types", "layer_types", "linear_attn_config",
        *(key for key, _ in _SIZES.values()),
    )  # fmt: skip
    idle = ("head_dim", "qk_head_dim", MTP_LAYERS, *ROPE_KEYS)
    respelled = ("linear_attn_config", "first_k_dense_replace")
    fixed = {**DeepSeekV3.fixed, "position.kind": "none", "mtp": None, "head.tied": False}
    fixed_there: ClassVar[Tree] = {
        "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "mla_use_nope": True,
        "tie_word_embeddings": False,  # transformers ties none, whatever is told
        "pad_token_id": None,  # where none is told, transformers takes 163839
    }  # fmt: skip
    older_endings = {  # transformers writes the dense layers so, and the published file has no such name
        f".mlp.{name}_proj.weight": f".block_sparse_moe.{name}_proj.weight" for name in ("gate", "up", "down")
    }
    built = {
        "block_sparse_moe": "mlp",
        **{f"self_attn.{name}": f"self_attn.forget_gate.{name}" for name in ("f_a", "f_b", "dt_bias", "A_log")},
    }

    def read(self, hf: Tree) -> Tree:
        first = read_first_dense(hf, hf.get("first_k_dense_replace", 1))
        mixture = DeepSeekMoE.read(self, {**hf, "n_group": hf.get("num_expert_group", 1), "first_k_dense_replace": first})
        pattern = read_pattern(self._types(hf), hf["num_hidden_layers"], (LINEAR,))
        if "recurrent" not in pattern:
            return {**mixture, "ffn.first_dense": first, "pattern": pattern}
        if (act := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ConfigError(f"config.json: hidden_act={act!r} is of the convolutions too, which are silu's in lm. Import another model.")
        said = hf.get("linear_attn_config") or {}
        width, heads, kernel = (said.get(key, hf.get(name, usual)) for key, (name, usual) in _SIZES.items())
        delta = {
            "kind": "gated_delta", "channels": True, "n_heads": heads, "n_k_heads": heads, "k_dim": width, "v_dim": width, "kernel": kernel,
            "eps": hf.get("rms_norm_eps", 1e-5),
        }  # fmt: skip
        return {**mixture, "ffn.first_dense": first, "pattern": pattern, "recurrent": delta}

    def _types(self, hf: Tree) -> list[str]:
        """Returns what each layer is. Of layer_types and linear_attn_config the former decides, as in transformers."""
        n, said = hf["num_hidden_layers"], hf.get("linear_attn_config") or {}
        if (types := hf.get("layer_types")) is not None:
            return list(types)
        if _FULL not in said or _DELTA not in said:
            return [ATTENDS[0] if layer and layer % 4 == 0 else LINEAR for layer in range(n)]
        named = dict.fromkeys(said[_FULL], ATTENDS[0]) | dict.fromkeys(said[_DELTA], LINEAR)
        if sorted(named) != list(range(1, n + 1)):
            raise ConfigError(f"config.json: linear_attn_config does not name each of the layers 1 to {n}. Restore the file.")
        return [named[layer] for layer in range(1, n + 1)]

    def write(self, ours: Tree) -> Tree:
        types, first = write_pattern(ours, LINEAR), ours["ffn.first_dense"]
        places = {name: [i + 1 for i, kind in enumerate(types) if kind == what] for name, what in ((_FULL, ATTENDS[0]), (_DELTA, LINEAR))}
        delta = {key: ours.get(f"recurrent.{name}") for key, name in zip(_SIZES, ("k_dim", "n_heads", "kernel"), strict=True)}
        there = {"num_key_value_heads": ours["attention.n_heads"], "first_k_dense_replace": first}
        return {**DeepSeekMoE.write(self, ours), **there, "linear_attn_config": {**places, **(delta if places[_DELTA] else {})}}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from super().block(here, there, ours)
        yield from module(f"{here}.recurrent_residual.norm", f"{there}.input_layernorm")
        if "recurrent.k_dim" not in ours:
            return
        here, there, qkv = f"{here}.recurrent", f"{there}.self_attn", Join(widths(ours))
        yield Pair((f"{here}.qkv.weight",), tuple(f"{there}.{name}_proj.weight" for name in "qkv"), qkv)
        yield Pair((f"{here}.kernel",), tuple(f"{there}.{name}_conv1d.weight" for name in "qkv"), Chain(qkv, Squeeze()))
        for name, theirs in _MATRICES.items():
            yield same(f"{here}.{name}.weight", f"{there}.{theirs}.weight")
        yield Pair((f"{here}.fade",), (f"{there}.A_log",), Shaped((1, 1, -1, 1)))
        yield same(f"{here}.step", f"{there}.dt_bias")
        yield same(f"{here}.norm", f"{there}.o_norm.weight")

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """w1 is the gate, w3 goes up and w2 down."""
        here, dense, there = f"{here}.ffn", f"{there}.mlp", f"{there}.block_sparse_moe"
        yield same(f"{here}.router.weight", f"{there}.gate.weight")
        yield same(f"{here}.router.correction_bias", f"{there}.gate.e_score_correction_bias")
        for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            yield same(f"{here}.{name}.weight", f"{dense}.{name}_proj.weight")
            yield same(f"{here}.shared.{name}.weight", f"{there}.shared_experts.{name}_proj.weight")
            yield experts(f"{here}.experts.{name}", f"{there}.experts.*.{theirs}.weight", ours["ffn.n_experts"])


FAMILY = KimiLinear()
