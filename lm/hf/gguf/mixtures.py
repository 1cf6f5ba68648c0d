"""llama.cpp's architectures with experts."""

import torch
from torch import Tensor

from lm.hf.gguf.architecture import Architecture
from lm.hf.gguf.dense import DIVIDED, Llama
from lm.nn.model_config import ModelConfig
from lm.nn.position.rope import RopeConfig
from lm.schema import Tree

_EXPERTS = {f"ffn.experts.{name}": f"ffn_{name}_exps.weight" for name in ("gate", "up", "down")} | {"ffn.router": "ffn_gate_inp"}


class Mixtral(Llama):
    """A llama with experts, whose weights add up to 1."""

    families = ("mixtral",)
    fixed = {
        "attention.window": None, "position.scaling.kind": DIVIDED, "position.fraction": 1.0, "ffn.expert.activation": "silu",
        "ffn.router.normalize": True, "ffn.capacity": None, "ffn.capacity_factor": None,
    }  # fmt: skip
    names = Llama.names | _EXPERTS


class Qwen3MoE(Architecture):
    """Experts in every layer, whose weights add up to 1."""

    name = "qwen3moe"
    families = ("qwen3_moe",)
    fixed = Architecture.fixed | {
        "ffn.expert.activation": "silu", "attention.out_bias": False, "ffn.router.normalize": True, "ffn.first_dense": 0, "ffn.every": 1,
        "ffn.capacity": None, "ffn.capacity_factor": None,
    }  # fmt: skip
    names = Architecture.names | _EXPERTS


class DeepSeek2(Architecture):
    """Latent attention as one shared key and value head, and experts behind the first layers."""

    name = "deepseek2"
    families = ("deepseek_v3",)
    fixed = {
        "position.scaling.kind": None, "ffn.expert.activation": "silu", "ffn.dense.activation": (None, "silu"), "attention.bias": False,
        "ffn.capacity": None, "ffn.capacity_factor": None,
    }  # fmt: skip
    names = Architecture.names | _EXPERTS | {
        "ffn.router.correction_bias": "exp_probs_b.bias",
        **{f"ffn.shared.{name}": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
        "attention.q_down": "attn_q_a",
        "attention.q_norm": "attn_q_a_norm",
        "attention.q_up": "attn_q_b",
        "attention.kv_down": "attn_kv_a_mqa",
        "attention.kv_norm": "attn_kv_a_norm",
        "attention.k_up": "attn_k_b",
        "attention.v_up": "attn_v_b",
    }  # fmt: skip

    def refuse(self, ours: Tree) -> None:
        super().refuse(ours)
        if ours["attention.latent_eps"] != ours["norm.eps"]:
            raise self.lacks(f"model.norm.eps={ours['norm.eps']}, and there it must be attention.latent_eps={ours['attention.latent_eps']}")
        lite = ours["n_layers"] in (26, 27)  # llama.cpp tells models without a query latent by that
        if lite != (ours["attention.q_rank"] is None):
            raise self.lacks(f"model.attention.q_rank={ours['attention.q_rank']} with {ours['n_layers']} layers: null is for 26 and 27")

    def attention(self, ours: Tree) -> Tree:
        a = {name: ours[f"attention.{name}"] for name in ("q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim")}
        return {
            **({"attention.q_lora_rank": a["q_rank"]} if a["q_rank"] is not None else {}),
            "attention.head_count_kv": 1,
            "attention.kv_lora_rank": a["kv_rank"],
            "attention.key_length": a["kv_rank"] + a["rope_dim"],
            "attention.value_length": a["kv_rank"],
            "attention.key_length_mla": a["nope_dim"] + a["rope_dim"],
            "attention.value_length_mla": a["v_dim"],
        }

    def ffn(self, ours: Tree) -> Tree:
        return super().ffn(ours) | {
            "leading_dense_block_count": ours["ffn.first_dense"],
            "expert_shared_count": ours["ffn.n_shared"],
            "expert_weights_scale": ours["ffn.router.scale"],
            "expert_weights_norm": ours["ffn.router.normalize"],
            "expert_group_count": ours["ffn.router.n_groups"],
            "expert_group_used_count": ours["ffn.router.top_groups"],
        }

    def rotation(self, cfg: ModelConfig, ours: Tree) -> Tree:
        assert isinstance(cfg.position, RopeConfig)
        return {"rope.dimension_count": ours["attention.rope_dim"], "rope.freq_base": cfg.position.theta}

    def changed(self, module: str, tensor: Tensor, ours: Tree) -> Tensor:
        h, rope = ours["attention.n_heads"], ours["attention.rope_dim"]
        if module in ("attention.k_up", "attention.v_up"):
            heads = tensor.unflatten(0, (h, -1))  # (h*c, r) -> (h, c, r)
            return heads.transpose(1, 2) if module.endswith("k_up") else heads
        if ours["position.interleaved"] or module not in ("attention.q", "attention.q_up", "attention.kv_down"):
            return tensor
        heads = tensor.unflatten(0, (1 if module.endswith("kv_down") else h, -1))
        kept, turned = heads.split([heads.shape[1] - rope, rope], dim=1)
        turned = turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return torch.cat([kept, turned], dim=1).flatten(0, 1)


class GptOss(Architecture):
    """Sinks, a window in every second layer, and experts with biases."""

    name = "gpt-oss"
    families = ("gpt_oss",)
    fixed = {
        "position.scaling.kind": (None, "linear", "yarn"), "position.fraction": 1.0, "attention.global_every": 2,
        "attention.global_at": None, "attention.qkv_bias": True, "attention.out_bias": True, "ffn.expert.gpt_oss_limit": 7.0,
        "ffn.capacity": None, "ffn.capacity_factor": None,
    }  # fmt: skip
    own_head = True
    names = Architecture.names | _EXPERTS | {
        "ffn_residual.norm": "post_attention_norm",
        "attention.sinks": "attn_sinks.weight",
        **{f"ffn.experts.{name}_bias": f"ffn_{name}_exps.bias" for name in ("gate", "up", "down")},
    }  # fmt: skip

    def keys(self, cfg: ModelConfig, ours: Tree) -> Tree:
        return super().keys(cfg, ours) | {"attention.sliding_window": ours["attention.window"]}
