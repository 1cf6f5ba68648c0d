"""MiniCPM3.  OpenBMB 2024; Hu et al. 2024, arXiv:2404.06395."""

import math

from lm.hf.families.youtu import Youtu
from lm.hf.io.family import without
from lm.schema import Tree


class MiniCPM3(Youtu):
    """Latent attention whose rotated pairs are half a head apart, and factors on the embedding, what each sublayer adds, and the logits."""

    name = "minicpm3"
    architecture = "MiniCPM3ForCausalLM"
    rare = False
    fields = {
        **without(Youtu.fields, "position.interleaved"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.q_rank": ("q_lora_rank", 768),
        "attention.kv_rank": ("kv_lora_rank", 256),
        "attention.nope_dim": ("qk_nope_head_dim", 64),
        "attention.rope_dim": ("qk_rope_head_dim", 32),
        "attention.v_dim": ("v_head_dim", None),
        "embed.scale": ("scale_emb", 12),
        "ffn.hidden": ("intermediate_size", 6400),
        "ffn.bias": ("mlp_bias", False),
    }
    further = (*Youtu.further, "scale_depth", "dim_model_base")
    fixed = {**Youtu.fixed, "position.interleaved": False}

    def read(self, hf: Tree) -> Tree:
        width, n = hf["hidden_size"], hf["num_hidden_layers"]
        depth, base = hf.get("scale_depth", 1.4), hf.get("dim_model_base", 256)
        return {
            **super().read({"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, **hf}),
            "attention.v_dim": hf.get("v_head_dim") or width // hf["num_attention_heads"],
            "block.residual_scale": 1.0 if depth is None else depth / math.sqrt(n),
            "head.scale": 1.0 if base is None else base / width,
        }

    def write(self, ours: Tree) -> Tree:
        depth, base = ours["block.residual_scale"] * math.sqrt(ours["n_layers"]), ours["head.scale"] * ours["d_model"]
        return {**super().write(ours), "scale_depth": depth, "dim_model_base": round(base)}


FAMILY = MiniCPM3(even_heads=True)
