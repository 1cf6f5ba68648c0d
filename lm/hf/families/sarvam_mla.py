"""Sarvam 105B.  Sarvam AI 2026; the mixture and the latent attention of DeepSeek-V3, arXiv:2412.19437."""

from lm.hf.families.deepseek_moe import MTP_LAYERS
from lm.hf.families.deepseek_v3 import DeepSeekV3
from lm.nn.model_config import ModelConfig
from lm.schema import Tree


class SarvamMLA(DeepSeekV3):
    """DeepSeek-V3 with other numbers where a file leaves them out; its published file spells some keys otherwise."""

    name = "sarvam_mla"
    architecture = "SarvamMLAForCausalLM"
    rare = True
    usual_dense = 16384
    renamed = {**DeepSeekV3.renamed, "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
    fields = {
        **DeepSeekV3.fields,
        "attention.q_rank": ("q_lora_rank", None),
        "ffn.n_experts": ("n_routed_experts", 128),
        "ffn.first_dense": ("first_k_dense_replace", 1),
        "ffn.router.n_groups": ("n_group", 1),
        "ffn.router.top_groups": ("topk_group", 1),
    }
    idle = ("q_head_dim",)
    respelled = ("head_dim",)  # of the latent with what rotates

    def config(self, hf: Tree) -> ModelConfig:
        ropes = {key: hf[key] for key in ("rope_scaling", "rope_parameters") if hf.get(key)}
        known = {key: {name: "yarn" if value == "deepseek_yarn" else value for name, value in rope.items()} for key, rope in ropes.items()}
        return super().config({MTP_LAYERS: 0, **hf, **known})


FAMILY = SarvamMLA()
