"""PLBART, of programs and what is said of them.  Ahmad et al. 2021, arXiv:2103.06333."""

from lm.hf.families.bart import Bart


class PLBart(Bart):
    """BART with a scaled embedding, whose decoder begins with the token of a language."""

    name = "plbart"
    architecture = "PLBartForConditionalGeneration"
    scaled = True
    fields = {
        **Bart.fields, "n_encoder_layers": ("encoder_layers", 6), "n_layers": ("decoder_layers", 6),
        "attention.n_heads": ("encoder_attention_heads", 12), "attention.dropout": ("attention_dropout", 0.1),
        "ffn.hidden": ("encoder_ffn_dim", 3072), "start_token": ("decoder_start_token_id", None),
    }  # fmt: skip
    idle = tuple(key for key in Bart.fixed_there if key != "is_encoder_decoder")  # its class reads none of them
    fixed_there = {"is_encoder_decoder": True}


FAMILY = PLBart()
