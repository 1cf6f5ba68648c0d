"""Sarvam 30B.  Sarvam AI 2026; the mixture of DeepSeek-V3, arXiv:2412.19437."""

from collections.abc import Iterator

from lm.hf.families.deepseek_moe import MTP_LAYERS
from lm.hf.families.glm4_moe import GLM4MoE
from lm.hf.io.family import Pair
from lm.hf.io.transforms import Split
from lm.nn.model_config import ModelConfig
from lm.schema import Tree


class SarvamMoE(GLM4MoE):
    """GLM-4.5 whose heads rotate as a whole, with queries, keys and values stored as one."""

    name = "sarvam_moe"
    architecture = "SarvamMoEForCausalLM"
    rare = True
    theta = 8000000.0
    partial = 1.0
    usual_dense = 8192
    renamed = {
        **GLM4MoE.renamed,
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    }
    built = {
        "model.word_embeddings": "model.embed_tokens", ".attention.dense": ".self_attn.o_proj",
        ".attention.query_layernorm": ".self_attn.q_norm", ".attention.key_layernorm": ".self_attn.k_norm",
        ".gate.expert_bias": ".gate.e_score_correction_bias",
    }  # fmt: skip
    fields = {
        **GLM4MoE.fields,
        "norm.eps": ("rms_norm_eps", 1e-6),
        "attention.n_kv_heads": ("num_key_value_heads", 4),
        "attention.head_dim": ("head_dim", 64),
        "ffn.expert.hidden": ("moe_intermediate_size", 1024),
        "ffn.top_k": ("num_experts_per_tok", 6),
        "ffn.router.scale": ("routed_scaling_factor", 2.5),
    }

    def config(self, hf: Tree) -> ModelConfig:
        return super().config({MTP_LAYERS: 0, "use_qk_norm": True, **hf})

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        q, kv = (ours[f"attention.{heads}"] * ours["attention.head_dim"] for heads in ("n_heads", "n_kv_heads"))
        for pair in self.built_pairs(ours):
            path, _, name = pair.ours[0].rpartition("attention.")
            if name in ("q.weight", "q.bias"):  # those of k and v come with it
                three = tuple(f"{path}attention.{each}{name[1:]}" for each in "qkv")
                yield Pair(three, (pair.theirs[0].replace(".self_attn.q_proj.", ".attention.query_key_value."),), Split([q, kv, kv]))
            elif name not in ("k.weight", "k.bias", "v.weight", "v.bias"):
                yield pair.renamed(self.in_file)

    def built_pairs(self, ours: Tree) -> Iterator[Pair]:
        return super().pairs(ours)


FAMILY = SarvamMoE()
