"""Falcon-H1.  Zuo et al. 2025, arXiv:2507.22448."""

import math
from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module, without
from lm.hf.options.mamba import mamba_pairs, read_mamba, write_mamba
from lm.schema import Tree

_PLAIN = [1.0] * 5


class FalconH1(Llama):
    """Llama with Mamba-2 beside the attention of each layer, reading the same norm, and factors on all that a layer computes (muP).

    An export has the factors on the inputs of attention and Mamba-2 within those behind their projections.
    """

    name = "falcon_h1"
    architecture = "FalconH1ForCausalLM"
    last_norm = "model.final_layernorm"
    recurrent_kind = "mamba2"
    unadapted = ("out_proj",)  # whose matrix its kernels read past the module
    fields = {
        **Llama.fields,
        "max_seq_len": ("max_position_embeddings", 8192),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
        "embed.scale": ("embedding_multiplier", 1.0),
        "head.scale": ("lm_head_multiplier", 1.0),
        "recurrent.gated_norm": ("mamba_rms_norm", False),
        "block.recurrent_scale": ("ssm_out_multiplier", 1.0),
    }
    further = (
        "attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "mlp_multipliers", "ssm_in_multiplier", "ssm_multipliers",
        "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_ssm", "mamba_d_state", "mamba_expand",
        "mamba_n_groups", "mamba_n_heads", "mamba_norm_before_gate", "time_step_limit",
    )  # fmt: skip
    idle = ("mamba_use_mlp", "mlp_expansion_factor", "num_logits_to_keep")
    respelled = (
        "attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "ssm_in_multiplier", "ssm_multipliers", "mamba_d_head",
        "mamba_d_ssm", "mamba_expand", "mamba_norm_before_gate",
    )  # fmt: skip
    fixed = {**Llama.fixed, "recurrent.kind": "mamba2", "pattern": ["both"]}
    fixed_there = {"mamba_proj_bias": False, "projectors_bias": False}

    def read(self, hf: Tree) -> Tree:
        heads, width = hf["num_attention_heads"], hf["hidden_size"]
        given = hf.get("mamba_d_ssm", 1024)
        state = read_mamba(hf, 1e-5, hf.get("mamba_expand", 2) * width if given is None else given)["recurrent"]
        if hf.get("mamba_rms_norm", False) and hf.get("mamba_norm_before_gate", True):
            raise ConfigError("config.json: mamba_norm_before_gate has no form in lm, where the gate comes first. Import another model.")
        before, key = hf.get("attention_in_multiplier", 1.0), hf.get("key_multiplier", 1.0)
        if before != 1.0 and hf.get("attention_bias", False):
            raise ConfigError(f"config.json: attention_in_multiplier={before} beside attention_bias has no form in lm. Import another one.")
        scales = [hf.get("ssm_in_multiplier", 1.0) * scale for scale in hf.get("ssm_multipliers") or _PLAIN]
        gate, down = hf.get("mlp_multipliers") or (1.0, 1.0)
        return {
            **{f"recurrent.{name}": value for name, value in state.items()},
            "recurrent.input_scales": None if scales == _PLAIN else scales,
            "recurrent.gated_norm": hf.get("mamba_rms_norm", False), "ffn.gate_scale": gate, "block.ffn_scale": down,
            "attention.scale": before**2 * key * (hf.get("head_dim") or width // heads) ** -0.5,  # before, in queries and in keys
            "block.attention_scale": before * hf.get("attention_out_multiplier", 1.0),
        }  # fmt: skip

    def write(self, ours: Tree) -> Tree:
        there = without(write_mamba(ours), "mamba_proj_bias")
        return {
            **there, "mamba_d_ssm": ours["recurrent.n_heads"] * ours["recurrent.head_dim"], "mamba_norm_before_gate": False,
            "attention_in_multiplier": 1.0, "attention_out_multiplier": ours["block.attention_scale"],
            "key_multiplier": _key_multiplier(ours["attention.scale"], ours["attention.head_dim"]), "ssm_in_multiplier": 1.0,
            "ssm_multipliers": ours["recurrent.input_scales"] or _PLAIN,
            "mlp_multipliers": [ours["ffn.gate_scale"], ours["block.ffn_scale"]],
        }  # fmt: skip

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from module(f"{here}.both_residual.norm", f"{there}.input_layernorm")
        yield from module(f"{here}.ffn_residual.norm", f"{there}.pre_ff_layernorm")
        for name in "qkvo":
            yield from module(f"{here}.both.attention.{name}", f"{there}.self_attn.{name}_proj")
        for name in ("gate", "up", "down"):
            yield from module(f"{here}.ffn.{name}", f"{there}.feed_forward.{name}_proj")
        if "recurrent.n_heads" in ours:
            yield from mamba_pairs(f"{here}.both.recurrent", f"{there}.mamba", ours)


def _key_multiplier(scale: float, head_dim: int) -> float:
    """Returns the number of which `read` makes this scale, to the bit where there is one."""
    key = scale / head_dim**-0.5
    near = (key, math.nextafter(key, 0.0), math.nextafter(key, math.inf))
    return next((each for each in near if each * head_dim**-0.5 == scale), key)


FAMILY = FalconH1()
