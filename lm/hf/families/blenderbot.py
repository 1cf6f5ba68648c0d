"""Blenderbot.  Roller et al. 2020, arXiv:2004.13637."""

from lm.hf.families.mbart import MBart


class Blenderbot(MBart):
    """mBART with no norm behind the embedding, and no unused rows in its tables of positions."""

    name = "blenderbot"
    architecture = "BlenderbotForConditionalGeneration"
    needs_start = True
    unused = 0
    fields = {
        **MBart.fields, "max_seq_len": ("max_position_embeddings", 128), "n_encoder_layers": ("encoder_layers", 2),
        "n_layers": ("decoder_layers", 24), "start_token": ("decoder_start_token_id", 1),
        "attention.n_heads": ("encoder_attention_heads", 32), "ffn.hidden": ("encoder_ffn_dim", 10240),
    }  # fmt: skip
    fixed = {**MBart.fixed, "embed.norm": False}
    fixed_there = {**MBart.fixed_there, "normalize_embedding": False}


FAMILY = Blenderbot()
