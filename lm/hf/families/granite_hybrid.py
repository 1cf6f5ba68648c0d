"""Granite 4, dense: Mamba-2 in most layers, attention in the others.  IBM 2025, "Granite 4.0 Language Models"."""

from collections.abc import Iterator
from typing import Any, ClassVar

from lm.errors import ConfigError
from lm.hf.families.granite import Granite
from lm.hf.io.family import Pair, module, modules
from lm.hf.io.transforms import Split
from lm.hf.options.mamba import MAMBA, mamba_pairs, read_mamba, write_mamba
from lm.hf.options.pattern import read_pattern, write_pattern
from lm.hf.options.rope import ROPE_KEYS, read_rope, write_rope
from lm.schema import Tree


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
        return {**super().read(hf), "pattern": pattern, **position, **(read_mamba(hf, 1e-6) if "recurrent" in pattern else {})}

    def write(self, ours: Tree) -> Tree:
        rope = {"position_embedding_type": "rope", **write_rope(ours)} if ours["position.kind"] == "rope" else {}
        return {**super().write(ours), "layer_types": write_pattern(ours, MAMBA[0]), **rope, **write_mamba(ours)}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for slot in ("attention", "recurrent"):
            yield from module(f"{here}.{slot}_residual.norm", f"{there}.input_layernorm")
        yield from module(f"{here}.ffn_residual.norm", f"{there}.post_attention_layernorm")
        for name in "qkvo":
            yield from module(f"{here}.attention.{name}", f"{there}.self_attn.{name}_proj")
        if "recurrent.n_heads" in ours:
            yield from mamba_pairs(f"{here}.recurrent", f"{there}.mamba", ours)
        yield from modules((f"{here}.ffn.gate", f"{here}.ffn.up"), f"{there}.shared_mlp.input_linear", Split([ours["ffn.hidden"]] * 2))
        yield from module(f"{here}.ffn.down", f"{there}.shared_mlp.output_linear")


FAMILY = GraniteHybrid()
