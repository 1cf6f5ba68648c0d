"""Mistral Small 4, text alone.  Mistral AI 2026."""

from collections.abc import Iterator
from math import nextafter
from typing import ClassVar

from lm.errors import ConfigError
from lm.hf.families.deepseek_moe import MTP_LAYERS, DeepSeekMoE
from lm.hf.families.deepseek_v3 import DeepSeekV3
from lm.hf.io.family import Pair, same, without
from lm.hf.io.transforms import Halves
from lm.hf.options.growth import RATE, rate_apart, read_growth, write_growth
from lm.nn.model_config import ModelConfig
from lm.schema import Tree

_PART = "partial_rotary_factor"
_USUAL: Tree = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, RATE: 0.1,
}  # fmt: skip
"""Rotary parameters, where the file has none."""


class Mistral4(DeepSeekV3):
    """DeepSeek-V3 with a softmax over experts, stacked in the file, queries that grow with their position, and no further tokens.

    Published files hold a model of images and text (model_type mistral3); this is what transformers saves of its text model.
    """

    name = "mistral4"
    architecture = "Mistral4ForCausalLM"
    auto = "Mistral4ForCausalLM"  # which AutoModelForCausalLM does not know
    usual_dense = 12288
    fields = {
        **DeepSeekV3.fields,
        "attention.q_rank": ("q_lora_rank", 1024),
        "attention.kv_rank": ("kv_lora_rank", 256),
        "attention.nope_dim": ("qk_nope_head_dim", 64),
        "ffn.n_experts": ("n_routed_experts", 128),
        "ffn.top_k": ("num_experts_per_tok", 4),
        "ffn.first_dense": ("first_k_dense_replace", 0),
        "ffn.router.n_groups": ("n_group", 1),
        "ffn.router.top_groups": ("topk_group", 1),
        "ffn.router.scale": ("routed_scaling_factor", 1.0),
    }
    renamed = {"num_local_experts": "n_routed_experts"}
    further: ClassVar[tuple[str, ...]] = tuple(key for key in DeepSeekV3.further if key != MTP_LAYERS)
    fixed = {**DeepSeekV3.fixed, "ffn.router.kind": "softmax", "mtp": None}
    fixed_there = {}

    def config(self, hf: Tree) -> ModelConfig:
        there = rate_apart(hf, _USUAL)
        parts = without(there["rope_parameters"], _PART)
        return super().config({**there, "rope_parameters": parts, _PART: there["rope_parameters"].get(_PART)})

    def read(self, hf: Tree) -> Tree:
        if (groups := hf.get("n_group", 1)) not in (1, None):
            raise ConfigError(
                f"config.json: n_group={groups}: groups are chosen by their two best experts, and in lm a softmax's by one."
                " Import another model."
            )
        rope, width = hf["rope_parameters"], self.widths(self._sizes(hf))["head_dim"]
        if (kind := rope.get("rope_type", rope.get("type", "default"))) == "default":
            raise ConfigError(
                f"config.json: rope_type={kind!r}: without a scaling transformers rotates whole heads, which fit no latent. Correct it."
            )
        turned = hf.get("qk_rope_head_dim", 64)
        if int(width * (turned / width if hf.get(_PART) is None else hf[_PART])) != turned:
            raise ConfigError(f"config.json: {_PART}={hf.get(_PART)} of {width} is not qk_rope_head_dim={turned}. Correct it.")
        scale = self._scale({"qk_nope_head_dim": 64, **hf})
        return {**DeepSeekMoE.read(self, hf), **scale, **read_growth(hf, self.name), "position.fraction": 1.0}

    def _sizes(self, hf: Tree) -> Tree:
        """Returns the options that `widths` needs."""
        return {ours: hf.get(key, missing) for ours, key, missing in self.places() if ours.startswith("attention.")}

    def write(self, ours: Tree) -> Tree:
        there, turned = write_growth(ours), ours["attention.rope_dim"]
        width = ours["attention.nope_dim"] + turned
        part = turned / width
        part = part if int(width * part) == turned else nextafter(part, 1.0)  # of 44, 30/44 are 29
        rope = {**there["rope_parameters"], _PART: part}
        return {**DeepSeekMoE.write(self, ours), **self.widths(ours), **there, "rope_parameters": rope}

    def widths(self, ours: Tree) -> Tree:
        there = super().widths(ours)
        return {**there, "head_dim": there["qk_head_dim"]}

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        here, there = f"{here}.ffn", f"{there}.mlp"
        yield same(f"{here}.router.weight", f"{there}.gate.weight")
        yield Pair((f"{here}.experts.gate", f"{here}.experts.up"), (f"{there}.experts.gate_up_proj",), Halves())
        yield same(f"{here}.experts.down", f"{there}.experts.down_proj")
        for name in ("gate", "up", "down"):
            yield same(f"{here}.{name}.weight", f"{there}.{name}_proj.weight")
            yield same(f"{here}.shared.{name}.weight", f"{there}.shared_experts.{name}_proj.weight")


FAMILY = Mistral4()
