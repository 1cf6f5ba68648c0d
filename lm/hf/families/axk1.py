"""A.X K1.  SK Telecom 2026."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.deepseek_moe import MTP_LAYERS, DeepSeekMoE
from lm.hf.families.deepseek_v3 import DeepSeekV3
from lm.hf.io.family import Pair, same, without
from lm.hf.options.pattern import read_first_dense, write_first_dense
from lm.schema import Tree


class AXK1(DeepSeekV3):
    """DeepSeek-V3 with a norm of what the experts of a layer give together, queries of a latent, and no further tokens."""

    name = "axk1"
    architecture = "AXK1ForCausalLM"
    rare = True
    fields = {
        **without(DeepSeekV3.fields, "ffn.first_dense"),
        "ffn.n_experts": ("n_routed_experts", 192),
    }
    renamed = {"num_local_experts": "n_routed_experts"}
    further = (*(key for key in DeepSeekV3.further if key != MTP_LAYERS), "mlp_layer_types", "first_k_dense_replace")
    idle = (MTP_LAYERS,)
    zero_if_missing = (".mlp.gate.e_score_correction_bias",)  # published files have none
    fixed = {**DeepSeekV3.fixed, "ffn.out_norm.kind": "rms", "mtp": None}

    def ignores(self, hf: Tree) -> tuple[str, ...]:
        """Published files have the norm in dense layers too, where nothing reads it."""
        return (*self.ignored, *(rf"(model\.)?layers\.{layer}\.post_mlp_layernorm\.weight" for layer in range(self._first_dense(hf))))

    def read(self, hf: Tree) -> Tree:
        if hf.get("q_lora_rank", 1536) is None:
            raise ConfigError(
                "config.json: q_lora_rank is null, and transformers' class makes all queries of a latent. Import another model."
            )
        first = self._first_dense(hf)
        mixture = DeepSeekMoE.read(self, {"n_group": 8, **hf, "first_k_dense_replace": first})
        return {**mixture, **self._scale(hf), "ffn.first_dense": first, "ffn.out_norm.eps": hf.get("rms_norm_eps", 1e-6)}

    def _first_dense(self, hf: Tree) -> int:
        return read_first_dense(hf, hf.get("first_k_dense_replace", 1))

    def write(self, ours: Tree) -> Tree:
        first = {"mlp_layer_types": write_first_dense(ours), "first_k_dense_replace": ours["ffn.first_dense"]}
        return {**DeepSeekMoE.write(self, ours), **self.widths(ours), **first}

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from super().ffn(here, there, ours)
        yield same(f"{here}.ffn.out_norm.weight", f"{there}.post_mlp_layernorm.weight")


FAMILY = AXK1()
