"""Granite 4, dense: Mamba-2 in most layers, attention in the others.  IBM 2025, "Granite 4.0 Language Models"."""

from collections.abc import Iterator
from math import inf
from typing import Any, ClassVar

from lm.errors import ConfigError
from lm.hf.families.granite import Granite
from lm.hf.io.family import Pair, module, modules, same
from lm.hf.io.transforms import Split, Squeeze
from lm.hf.options.pattern import read_pattern, write_pattern
from lm.hf.options.rope import ROPE_KEYS, read_rope, write_rope
from lm.schema import Tree

MAMBA = ("linear_attention", "mamba")  # in transformers 5, and in published files
UNLIMITED = ([0.0, inf], [0.0, {"__float__": "Infinity"}])
"""Steps of any size, in published files and as transformers 5 writes it."""


def require_free_steps(hf: Tree) -> None:
    """Raises ConfigError for a mixer whose steps have limits."""
    if (limit := hf.get("time_step_limit") or UNLIMITED[0]) not in UNLIMITED:
        raise ConfigError(f"config.json: time_step_limit={limit} limits what no option of lm does. Import another model.")


class GraniteHybrid(Granite):
    """Granite with layers of Mamba-2, whose heads together are as wide as a multiple of d_model, and mostly without positions.

    With mamba_proj_bias, which no published model has, transformers lets padding into the convolution of the tokens behind it; lm does not.
    """

    name = "granitemoehybrid"
    architecture = "GraniteMoeHybridForCausalLM"
    hybrid = True
    theta: ClassVar[float | None] = None  # most of these models have no positions
    renamed: ClassVar[dict[str, str]] = {"layers_block_type": "layer_types"}
    fields: ClassVar[dict[str, str | tuple[str, Any]]] = {
        **{ours: theirs for ours, theirs in Granite.fields.items() if ours not in ("ffn.bias", "ffn.hidden", "attention.head_dim")},
        "ffn.hidden": ("shared_intermediate_size", 1024),
    }
    further: ClassVar[tuple[str, ...]] = (
        "layer_types", "position_embedding_type", "intermediate_size", "num_experts_per_tok", "mamba_n_heads", "mamba_n_groups",
        "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias",
        *ROPE_KEYS, "time_step_limit", "time_step_min", "time_step_max", "time_step_floor", "logits_scaling", "normalization_function",
    )  # fmt: skip
    respelled: ClassVar[tuple[str, ...]] = ("layer_types", "position_embedding_type", "mamba_d_head", "mamba_n_heads")
    fixed: ClassVar[Tree] = {key: value for key, value in Granite.fixed.items() if key != "position.kind"}
    fixed_there: ClassVar[Tree] = {"num_local_experts": 0}

    def read(self, hf: Tree) -> Tree:
        n = hf["num_hidden_layers"]
        pattern = read_pattern(hf.get("layer_types") or [MAMBA[0]] * n, n, MAMBA)
        position = read_rope(hf) if hf.get("position_embedding_type") == "rope" else {"position.kind": "none"}
        if n_experts := hf.get("num_local_experts", 8):
            raise ConfigError(
                f"config.json: num_local_experts={n_experts}, and lm knows {self.name} without experts only. Import a dense one."
            )
        return {**super().read(hf), "pattern": pattern, **position, **(self.mamba(hf) if "recurrent" in pattern else {})}

    def mamba(self, hf: Tree) -> Tree:
        """The mixer of layers that do not attend."""
        if (act := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ConfigError(f"config.json: hidden_act={act!r} is of the convolutions too, which are silu's in lm. Import another model.")
        require_free_steps(hf)
        heads, width = hf.get("mamba_n_heads", 128), hf["hidden_size"]
        head = hf.get("mamba_d_head", "auto")
        inner = hf.get("mamba_expand", 2) * width
        if head != "auto" and heads * head != inner:
            raise ConfigError(f"config.json: {heads} heads of mamba_d_head={head} are not mamba_expand times hidden_size={width} wide.")
        recurrent = {
            "kind": "mamba2", "n_heads": heads, "head_dim": inner // heads,
            "state_dim": hf.get("mamba_d_state", 256), "groups": hf.get("mamba_n_groups", 1), "kernel": hf.get("mamba_d_conv", 4),
            "kernel_bias": hf.get("mamba_conv_bias", True), "bias": hf.get("mamba_proj_bias", False),
            "eps": hf.get("rms_norm_eps", 1e-6),
        }  # fmt: skip
        return {"recurrent": recurrent}

    def write(self, ours: Tree) -> Tree:
        rope = {"position_embedding_type": "rope", **write_rope(ours)} if ours["position.kind"] == "rope" else {}
        return {**super().write(ours), "layer_types": write_pattern(ours, MAMBA[0]), **rope, **self.mamba_keys(ours)}

    def mamba_keys(self, ours: Tree) -> Tree:
        """The keys of that mixer."""
        if ours.get("recurrent.kind") != "mamba2":
            return {"mamba_n_heads": 1}  # their default must divide a width that no layer has
        theirs = {"n_heads": "n_heads", "n_groups": "groups", "d_state": "state_dim", "d_head": "head_dim", "d_conv": "kernel"}
        theirs |= {"conv_bias": "kernel_bias", "proj_bias": "bias"}
        expand = ours["recurrent.n_heads"] * ours["recurrent.head_dim"] // ours["d_model"]
        return {"mamba_expand": expand, **{f"mamba_{key}": ours[f"recurrent.{name}"] for key, name in theirs.items()}}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for slot in ("attention", "recurrent"):
            yield from module(f"{here}.{slot}_residual.norm", f"{there}.input_layernorm")
        yield from module(f"{here}.ffn_residual.norm", f"{there}.post_attention_layernorm")
        for name in "qkvo":
            yield from module(f"{here}.attention.{name}", f"{there}.self_attn.{name}_proj")
        if "recurrent.n_heads" in ours:
            yield from self.mamba_pairs(f"{here}.recurrent", f"{there}.mamba", ours)
        yield from modules((f"{here}.ffn.gate", f"{here}.ffn.up"), f"{there}.shared_mlp.input_linear", Split([ours["ffn.hidden"]] * 2))
        yield from module(f"{here}.ffn.down", f"{there}.shared_mlp.output_linear")

    def mamba_pairs(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """The tensors of that mixer."""
        heads, groups = ours["recurrent.n_heads"], ours["recurrent.groups"]
        x, b = heads * ours["recurrent.head_dim"], groups * ours["recurrent.state_dim"]
        yield from modules((f"{here}.gate", f"{here}.xbc", f"{here}.rate"), f"{there}.in_proj", Split([x, x + 2 * b, heads]))
        yield Pair((f"{here}.kernel",), (f"{there}.conv1d.weight",), Squeeze())
        names = {"kernel_bias": "conv1d.bias", "fade": "A_log", "step": "dt_bias", "skip": "D", "norm": "norm.weight"}
        yield from (same(f"{here}.{name}", f"{there}.{theirs}") for name, theirs in names.items())
        yield from module(f"{here}.o", f"{there}.out_proj")


FAMILY = GraniteHybrid()
