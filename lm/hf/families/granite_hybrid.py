"""Granite 4: Mamba-2 in most layers, attention in the others.  IBM 2025, "Granite 4.0 Language Models"."""

from collections.abc import Iterator
from typing import ClassVar

from lm.hf.families.granite import Granite
from lm.hf.families.granitemoeshared import GraniteMoEShared
from lm.hf.io.family import Pair, activation, hf_activation, module, modules, without
from lm.hf.io.transforms import Split
from lm.hf.options.mamba import MAMBA, mamba_pairs, read_mamba, write_mamba
from lm.hf.options.pattern import read_pattern, write_pattern
from lm.hf.options.rope import ROPE_KEYS, read_rope, write_rope
from lm.nn.model_config import ModelConfig
from lm.schema import Tree


class GraniteHybrid(GraniteMoEShared):
    """Granite, dense or with experts and a shared one, with layers of Mamba-2, whose heads together are as wide as a multiple of d_model,
    and mostly without positions.

    With mamba_proj_bias, which no published model has, transformers lets padding into the convolution of the tokens behind it; lm does not.
    """

    name = "granitemoehybrid"
    architecture = "GraniteMoeHybridForCausalLM"
    recurrent_kind = "mamba2"
    theta: ClassVar[float | None] = None  # most of these models have no positions
    renamed = {"layers_block_type": "layer_types"}
    fields = without(Granite.fields, "ffn.*", "attention.head_dim")
    further: ClassVar[tuple[str, ...]] = (
        "layer_types", "position_embedding_type", "intermediate_size", "num_experts_per_tok", "mamba_n_heads", "mamba_n_groups",
        "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias",
        *ROPE_KEYS, "time_step_limit", "time_step_min", "time_step_max", "time_step_floor", "logits_scaling", "normalization_function",
        "hidden_act", "shared_intermediate_size", "num_local_experts",
    )  # fmt: skip
    respelled: ClassVar[tuple[str, ...]] = ("layer_types", "position_embedding_type", "mamba_d_head", "mamba_n_heads")
    fixed = without(Granite.fixed, "position.kind", "ffn.*")

    def homeless(self, cfg: ModelConfig) -> list[str]:
        kinds = ("mlp", "moe")
        return super().homeless(cfg) if cfg.ffn.kind in kinds else [f"model.ffn.kind={cfg.ffn.kind} must be {' or '.join(kinds)}"]

    def read(self, hf: Tree) -> Tree:
        n = hf["num_hidden_layers"]
        pattern = read_pattern(hf.get("layer_types") or [MAMBA[0]] * n, n, MAMBA)
        position = read_rope(hf) if hf.get("position_embedding_type") == "rope" else {"position.kind": "none"}
        mamba = read_mamba(hf, 1e-6) if "recurrent" in pattern else {}
        return {**Granite.read(self, hf), "pattern": pattern, **position, **mamba, **self._feed_forward(hf)}

    def _feed_forward(self, hf: Tree) -> Tree:
        act, width = activation(hf, "hidden_act", "silu"), hf.get("shared_intermediate_size", 1024)
        if not (n_experts := hf.get("num_local_experts", 8)):
            return {"ffn.kind": "mlp", "ffn.gated": True, "ffn.activation": act, "ffn.hidden": width}
        return {
            "ffn.kind": "moe", "ffn.n_experts": n_experts, "ffn.top_k": hf.get("num_experts_per_tok", 2), "ffn.n_shared": 1,
            "ffn.shared_hidden": width, "ffn.expert.gated": True, "ffn.expert.activation": act,
            "ffn.expert.hidden": hf.get("intermediate_size", 11008),
        }  # fmt: skip

    def write(self, ours: Tree) -> Tree:
        rope = {"position_embedding_type": "rope", **write_rope(ours)} if ours["position.kind"] == "rope" else {}
        ffn: Tree = {"num_local_experts": 0}
        act, width = ours.get("ffn.activation"), ours.get("ffn.hidden")
        if ours["ffn.kind"] == "moe":
            act, width = ours["ffn.expert.activation"], ours["ffn.shared_hidden"]
            names = {"num_local_experts": "n_experts", "num_experts_per_tok": "top_k", "intermediate_size": "expert.hidden"}
            ffn = {theirs: ours[f"ffn.{name}"] for theirs, name in names.items()}
        ffn |= {"hidden_act": hf_activation(act), "shared_intermediate_size": width}
        return {**Granite.write(self, ours), "layer_types": write_pattern(ours, MAMBA[0]), **ffn, **rope, **write_mamba(ours)}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for slot in ("attention", "recurrent"):
            yield from module(f"{here}.{slot}_residual.norm", f"{there}.input_layernorm")
        yield from module(f"{here}.ffn_residual.norm", f"{there}.post_attention_layernorm")
        for name in "qkvo":
            yield from module(f"{here}.attention.{name}", f"{there}.self_attn.{name}_proj")
        if "recurrent.n_heads" in ours:
            yield from mamba_pairs(f"{here}.recurrent", f"{there}.mamba", ours)
        yield from self.ffn(here, there, ours)

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of experts and what every token passes beside them, or of this alone."""
        if ours["ffn.kind"] == "moe":
            yield from super().ffn(here, there, ours)
            return
        yield from modules((f"{here}.ffn.gate", f"{here}.ffn.up"), f"{there}.shared_mlp.input_linear", Split([ours["ffn.hidden"]] * 2))
        yield from module(f"{here}.ffn.down", f"{there}.shared_mlp.output_linear")


FAMILY = GraniteHybrid()
