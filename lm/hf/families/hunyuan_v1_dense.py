"""HunYuan, dense: 0.5B to 7B.  Tencent 2025, "Hunyuan-7B-Instruct"."""

import re
from collections.abc import Iterator
from typing import ClassVar

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, without
from lm.nn.model_config import ModelConfig
from lm.schema import Tree


class HunYuanDense(Llama):
    """Llama with a norm on each head's queries and keys behind their rotation."""

    name = "hunyuan_v1_dense"
    architecture = "HunYuanDenseV1ForCausalLM"
    fields = {
        **without(Llama.fields, "ffn.bias"),
        "norm.eps": ("rms_norm_eps", 1e-5),
    }
    idle: ClassVar[tuple[str, ...]] = (
        "attention_head_dim", "cla_share_factor", "norm_type", "num_experts", "org_vocab_size", "routed_scaling_factor", "use_cla",
        "use_mla", "use_rotary_pos_emb",
    )  # fmt: skip
    fixed = {**Llama.fixed, "attention.qk_norm": "rotated"}
    fixed_there = {"use_qk_norm": True}

    def config(self, hf: Tree) -> ModelConfig:
        """As `Family.config`. What files call dynamic, with an alpha, is a larger base whatever the length, and is read as that."""
        return super().config({**hf, **{key: self._stretched(hf, hf[key]) for key in ("rope_scaling", "rope_parameters") if hf.get(key)}})

    def _stretched(self, hf: Tree, told: Tree) -> Tree:
        alpha = told.get("alpha") if told.get("rope_type", told.get("type")) == "dynamic" else None
        if not alpha:
            return told
        width = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        theta = told.get("rope_theta", hf.get("rope_theta", self.theta))
        return {"rope_type": "default", "rope_theta": theta * alpha ** (width / (width - 2))}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for pair in super().block(here, there, ours):
            yield pair.renamed(lambda key: re.sub(r"self_attn\.(q|k)_norm", _norm, key))


def _norm(found: re.Match[str]) -> str:
    return f"self_attn.{'query' if found[1] == 'q' else 'key'}_layernorm"


FAMILY = HunYuanDense()
