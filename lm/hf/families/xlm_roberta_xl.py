"""XLM-RoBERTa-XL and XXL.  Goyal et al. 2021, arXiv:2105.00572."""

from lm.hf.families.roberta import Roberta
from lm.hf.families.roberta_prelayernorm import RobertaPreNorm


class XLMRobertaXL(RobertaPreNorm):
    """RoBERTa with norms before the sublayers and behind the last, and none behind the embedding."""

    name = "xlm-roberta-xl"
    architecture = "XLMRobertaXLForMaskedLM"
    root = Roberta.root
    ignored = Roberta.ignored
    fixed = {**RobertaPreNorm.fixed, "embed.norm": False}
    fields = {
        **RobertaPreNorm.fields,
        "max_seq_len": ("max_position_embeddings", 514),
        "norm.eps": ("layer_norm_eps", 1e-5),
    }
    norms = ("attention.self_attn_layer_norm", "LayerNorm", "encoder.LayerNorm")


FAMILY = XLMRobertaXL()
