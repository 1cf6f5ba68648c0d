"""FlexOlmo.  Shi et al. 2025, arXiv:2507.07024."""

from lm.hf.families.olmo2 import OLMo2
from lm.hf.families.olmoe import OLMoE


class FlexOLMo(OLMo2, OLMoE):
    """OLMo 2's norms behind the sublayers, and OLMoE's experts."""

    name = "flex_olmo"
    architecture = "FlexOlmoForCausalLM"
    theta = 500000.0
    fields = {
        **OLMoE.fields,
        "norm.eps": ("rms_norm_eps", 1e-6),
        "attention.head_dim": ("head_dim", None),
        "ffn.expert.hidden": ("intermediate_size", 11008),
        "ffn.n_experts": ("num_experts", 7),
        "ffn.top_k": ("num_experts_per_tok", 5),
    }
    fixed = {**OLMoE.fixed, "norm.place": "output"}
    fixed_there = {"pad_token_id": None}  # where none is told, transformers takes 100277


FAMILY = FlexOLMo()
