"""M2M-100 and NLLB.  Fan et al. 2020, arXiv:2010.11125; NLLB team 2022, arXiv:2207.04672."""

from lm.hf.families.mbart import MBart
from lm.hf.families.xglm import FAIRSEQ


class M2M100(MBart):
    """mBART with sines and cosines for positions, and neither a norm behind the embedding nor a bias on the logits."""

    name = "m2m_100"
    architecture = "M2M100ForConditionalGeneration"
    pad = 1
    scaled = True
    ignored = (*MBart.ignored, r"(model\.)?(encoder|decoder)\.embed_positions\.weights")
    zero_if_missing = ()
    fields = {
        **MBart.fields, "ffn.activation": ("activation_function", "relu"), "attention.dropout": ("attention_dropout", 0.1),
        "start_token": ("decoder_start_token_id", 2),
    }  # fmt: skip
    fixed = {**MBart.fixed, **FAIRSEQ, "embed.norm": False, "head.bias": False}
    idle = tuple(key for key in MBart.fixed_there if key != "is_encoder_decoder")  # its class reads none of them
    fixed_there = {"is_encoder_decoder": True}


FAMILY = M2M100()
